"""What masks hold at 512K tokens: every form of the static masks in memory that is linear in the tokens and in the pairs of tiles."""

import json
import subprocess
import sys

from pytest_longca.catalogue import MASK_GROUPS

SEQLEN = 512 * 1024
TILE_PAIRS = (SEQLEN // 128) ** 2
LISTED = ("causal", "shared_question")
"""Masks whose tile lists are made too: one family with many tiles, one with two runs in a row."""

MEASURE = """
import json, resource, sys
import torch
from pytest_longca.catalogue import MASKS, load

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def lists(mask):
    tiles = mask.tiles("cpu", 128, 128)
    tiles.by_query(), tiles.by_key()

torch.set_num_threads(1)
seqlen, names, listed = json.loads(sys.argv[1])
before, peaks = peak(), {}
masks = {name: load(MASKS[name]).default(seqlen) for name in names}
for form, wanted in (("row_intervals", names), ("area", names), ("columns", names), ("varlen", names), ("lists", listed)):
    for name in wanted:
        lists(masks[name]) if form == "lists" else getattr(masks[name], form)()
    peaks[form] = peak() - before
print(json.dumps(peaks))
"""


def test_no_form_of_a_512k_mask_holds_pairs_of_tokens() -> None:
    question = json.dumps([SEQLEN, MASK_GROUPS["static"], LISTED])
    done = subprocess.run([sys.executable, "-c", MEASURE, question], capture_output=True, text=True, check=True, timeout=120)
    peaks = json.loads(done.stdout)
    # One bool for each pair of tokens would be 256 GiB.
    assert peaks["varlen"] < 500 * SEQLEN, "intervals, area, columns and varlen are linear in the tokens"
    assert peaks["lists"] < 500 * SEQLEN + 64 * TILE_PAIRS, "tile lists are linear in the pairs of tiles"
