"""Where a session's own kernels and masks come from: files and modules, by name, so that a worker can load them again."""

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pytest_longca.catalogue import Catalogue
from pytest_longca.errors import InvalidArgument

if TYPE_CHECKING:
    from pytest_longca.parallel.mechanisms import Mechanism

HOOKS = ("pytest_longca_kernels", "pytest_longca_masks")


@dataclass(frozen=True, slots=True)
class Source:
    """A file or an importable module that implements one of our hooks."""

    name: str
    path: str | None

    def to_json(self) -> list[str | None]:
        return [self.name, self.path]


def sources_of(pluginmanager: Any) -> tuple[Source, ...]:
    """The sources of all plugins that implement our hooks. Raises InvalidArgument for a plugin that has no file."""
    plugins: dict[int, Any] = {}
    for hook in HOOKS:
        for implementation in getattr(pluginmanager.hook, hook).get_hookimpls():
            plugins[id(implementation.plugin)] = implementation.plugin
    return tuple(_source_of(plugin) for plugin in plugins.values())


def _source_of(plugin: Any) -> Source:
    if not isinstance(plugin, ModuleType) or not plugin.__file__:
        raise InvalidArgument(
            f"{plugin!r} adds kernels or masks, but workers cannot import it: "
            "put the hook into a conftest.py or a module, or use --longca-isolate=off"
        )
    return Source(plugin.__name__, plugin.__file__)


def load_catalogue(sources: Iterable[Source]) -> Catalogue:
    """Import the sources and ask their hooks. Raises InvalidArgument, naming the source, for whatever they do wrong."""
    kernels: list[Any] = []
    masks: list[Any] = []
    for source in sources:
        module = _import(source)
        kernels += _ask(module, "pytest_longca_kernels", source)
        masks += _ask(module, "pytest_longca_masks", source)
    return _checked(kernels, masks)


def catalogue_of(pluginmanager: Any) -> Catalogue:
    """The catalogue of plugins that are loaded in this process."""
    kernels: list[Any] = []
    masks: list[Any] = []
    for hook, into in zip(HOOKS, (kernels, masks), strict=True):
        for implementation in getattr(pluginmanager.hook, hook).get_hookimpls():
            name = getattr(implementation.plugin, "__file__", None) or repr(implementation.plugin)
            into += _ask(implementation.plugin, hook, Source(hook, str(name)))
    return _checked(kernels, masks)


def mechanisms_of(pluginmanager: Any) -> "dict[str, Mechanism]":
    """Mechanisms of context parallelism by name: the built-in ones and those of loaded plugins. Raises InvalidArgument for a wrong one."""
    from pytest_longca.parallel.mechanisms import MECHANISMS, Mechanism

    found = dict(MECHANISMS)
    for implementation in pluginmanager.hook.pytest_longca_mechanisms.get_hookimpls():
        path = getattr(implementation.plugin, "__file__", None) or repr(implementation.plugin)
        for row in _ask(implementation.plugin, "pytest_longca_mechanisms", Source("pytest_longca_mechanisms", str(path))):
            if not isinstance(row, Mechanism):
                raise InvalidArgument(f"pytest_longca_mechanisms returned {row!r}: return pytest_longca.parallel.mechanisms.Mechanism")
            if row.name in found:
                raise InvalidArgument(f"two mechanisms are named {row.name!r}: rename one of them")
            found[row.name] = row
    return found


def _checked(kernels: list[Any], masks: list[Any]) -> Catalogue:
    from pytest_longca.kernel import Kernel

    for kernel in kernels:
        if not isinstance(kernel, Kernel):
            raise InvalidArgument(
                f"pytest_longca_kernels returned {kernel!r}: return instances of pytest_longca.kernel.Kernel, such as [MyKernel()]"
            )
    for mask in masks:
        _check_mask(mask)
    return Catalogue(kernels, masks)


PROBE_LENGTHS = (4, 7)
"""Queries and keys on which a user's mask_mod is tried: no two axes of its result may have the same length by chance."""


def _check_mask(mask: Any) -> None:
    """Raise InvalidArgument unless it is a mask class, and one whose mask_mod, if it is made of one, returns what it must."""
    from pytest_longca.mask import Mask, ModMask

    if not (isinstance(mask, type) and issubclass(mask, Mask)):
        raise InvalidArgument(
            f"pytest_longca_masks returned {mask!r}: return subclasses of pytest_longca.mask.Mask (the class, not an instance)"
        )
    if not issubclass(mask, ModMask):
        return
    try:
        mask(*PROBE_LENGTHS).dense()
    except InvalidArgument:
        raise
    except Exception:  # a mod may be made for longer sequences only, and says so when it runs
        return


def _ask(module: Any, hook: str, source: Source) -> list[Any]:
    function = getattr(module, hook, None)
    if function is None:
        return []
    try:
        return list(function())
    except Exception as error:
        raise InvalidArgument(f"{hook} in {source.path} raised {type(error).__name__}: {error}") from error


def _import(source: Source) -> ModuleType:
    if source.name in sys.modules and getattr(sys.modules[source.name], "__file__", None) == source.path:
        return sys.modules[source.name]
    if source.path is None:
        return importlib.import_module(source.name)
    spec = importlib.util.spec_from_file_location(source.name, source.path)
    if spec is None or spec.loader is None:
        raise InvalidArgument(f"{source.path} cannot be imported: it is no Python file")
    module = importlib.util.module_from_spec(spec)
    if str(Path(source.path).parent) not in sys.path:
        sys.path.insert(0, str(Path(source.path).parent))
    sys.modules[source.name] = module
    spec.loader.exec_module(module)
    return module
