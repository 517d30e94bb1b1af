"use strict";
// Draws the page from the records that it carries. Everything from a record goes through textContent or setAttribute: it is data.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RECORDS = DATA.rows.map(row => {
  const record = {};
  DATA.fields.forEach((field, i) => { record[field] = DATA.texts.includes(field) ? DATA.strings[row[i]] : row[i]; });
  return record;
});
// One for each kernel and setting: with several processes, the figures over all of them.
const TIMED = DATA.timed.map(([i, ...figures]) => {
  const over = ["median_ms", "p20_ms", "p80_ms", "tflop_per_s", "of_peak"].slice(0, figures.length);
  return { ...RECORDS[i], ...Object.fromEntries(over.map((name, j) => [name, figures[j]])) };
});
const CELLS = new Map(DATA.cells.map(([kernel, mask, kind]) => [kernel + "\n" + mask, kind]));
const LACKS = new Map(DATA.cells.map(([kernel, mask, kind, lacks]) => [kernel + "\n" + mask, lacks]));
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c8c3a"]; // Okabe and Ito, told apart by the colour-blind
const CIVIDIS = [[0, 32, 77], [49, 68, 107], [102, 105, 112], [149, 143, 120], [200, 184, 102], [255, 234, 70]];

const $ = id => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "g", "line", "text", "circle", "title"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}

const unique = values => [...new Set(values)];
const PASSES = ["fwd", "bwd", "fwd_bwd"];
const passes = records => PASSES.filter(direction => records.some(r => r.direction === direction));
const digits = value => value === null || value === undefined ? "" : typeof value === "string" ? value
  : value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3) ? value.toExponential(2) : String(Number(value.toPrecision(3)));
const percent = value => value === null || value === undefined ? "" : typeof value === "string" ? value : (100 * value).toFixed(value < 0.1 ? 1 : 0) + " %";
const signed = value => value === null || value === undefined ? "" : typeof value === "string" ? value : (value > 0 ? "+" : "") + (100 * value).toFixed(1) + " %";
const bytes = value => {
  if (value === null || value === undefined) return "";
  const power = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.max(value, 1)) / 10)));
  return digits(value / 1024 ** power) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][power];
};
const tokens = value => value % 1024 ? String(value) : value / 1024 + "K";

const METRICS = {
  outcome: { label: "outcome", text: () => "", get: () => null },
  tflop_per_s: { label: "TFLOP/s", text: digits, get: r => r.tflop_per_s },
  of_peak: { label: "fraction of the device's peak", text: percent, get: r => r.of_peak },
  median_ms: { label: "time (ms)", text: digits, get: r => r.median_ms, low: true },
  peak_bytes: { label: "peak memory", text: bytes, get: r => r.peak_bytes, low: true },
  error: { label: "worst error / limit", text: digits, get: r => r.error, low: true },
};

// Filters -----------------------------------------------------------------------------------------------------------------

function options(select, values, first, shown = value => value) {
  select.replaceChildren(...(first === null ? [] : [make("option", { value: "" }, first)]), ...values.map(value => make("option", { value }, shown(value))));
}

function isVisible(record) {
  const find = $("find").value.trim().toLowerCase();
  return ["kernel", "mask", "kind"].every(name => !$(name).value || record[name] === $(name).value)
    && (!find || [record.kernel, record.mask, record.reason, record.shape, record.stage, record.case].some(text => text.toLowerCase().includes(find)));
}

// Tables ------------------------------------------------------------------------------------------------------------------

class Table {
  // `below` makes what is too long for a column: a line of its own under the row, at the left edge.
  constructor(parent, columns, { page, sort = null, descending = false, below = () => null }) {
    Object.assign(this, { parent, columns, page, sort, descending, below, shown: page, rows: [] });
  }
  show(rows) {
    this.rows = rows;
    this.shown = this.page;
    this.draw();
  }
  sorted() {
    if (this.sort === null) return this.rows;
    const get = this.columns[this.sort].get, sign = this.descending ? -1 : 1;
    const rank = value => value === null || value === undefined || value === "";
    return [...this.rows].sort((a, b) => {
      const x = get(a), y = get(b);
      if (rank(x) || rank(y)) return rank(x) - rank(y);
      return sign * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), undefined, { numeric: true }));
    });
  }
  header(column, i) {
    const sorts = i === this.sort ? { "aria-sort": this.descending ? "descending" : "ascending" } : {};
    const button = make("button", { type: "button" }, column.name);
    button.onclick = () => {
      this.descending = i === this.sort ? !this.descending : Boolean(column.number);
      this.sort = i;
      this.draw();
    };
    return make("th", { scope: "col", ...sorts, ...(column.number ? { class: "number" } : {}) }, button);
  }
  cell(column, row) {
    const value = column.get(row), shown = column.node ? column.node(row) : (column.text || digits)(value);
    return make("td", { class: [column.number ? "number" : "", column.style ? column.style(row) : ""].join(" ").trim() }, shown);
  }
  lines(row) {
    const below = this.below(row), line = make("tr", below ? { class: "above" } : {}, ...this.columns.map(column => this.cell(column, row)));
    return below ? [line, make("tr", { class: "below" }, make("td", { colspan: this.columns.length }, below))] : [line];
  }
  draw() {
    const rows = this.sorted().slice(0, this.shown);
    const body = make("tbody", {}, ...rows.flatMap(row => this.lines(row)));
    const table = make("table", {}, make("thead", {}, make("tr", {}, ...this.columns.map((column, i) => this.header(column, i)))), body);
    const parts = [make("div", { class: "scroll" }, table)];
    if (this.shown < this.rows.length) {
      const more = make("button", { type: "button" }, `Show more (${this.rows.length - this.shown} hidden)`);
      more.onclick = () => { this.shown += 5 * this.page; this.draw(); };
      parts.push(more);
    }
    this.parent.replaceChildren(...(this.rows.length ? parts : [make("p", { class: "quiet" }, "None among the records shown.")]));
  }
}

const plain = name => ({ name, get: r => r[name], text: value => value || "" });
const number = (name, label, text = digits) => ({ name: label, get: r => r[name], text, number: true });
const optional = column => ({ ...column, isOptional: true });
const isFilled = value => value !== null && value !== undefined && value !== "";
const filled = (columns, records) => columns.filter(column => !column.isOptional || records.some(r => isFilled(column.get(r))));
const why = record => record.reason || (record.replay && record.kind !== "passed") ? make("div", { class: "reason" }, record.reason,
  record.reason && record.replay ? make("br") : null, record.replay && record.kind !== "passed" ? make("code", {}, record.replay) : null) : null;
const word = record => DATA.marks[record.kind].word;
const tone = record => ({ red: "bad", green: "good" })[DATA.marks[record.kind].colour] || "";

// The heat map ------------------------------------------------------------------------------------------------------------

function heatColour(share) {
  const at = Math.min(0.9999, Math.max(0, share)) * (CIVIDIS.length - 1), low = Math.floor(at);
  const [r, g, b] = CIVIDIS[low].map((from, i) => Math.round(from + (at - low) * (CIVIDIS[low + 1][i] - from)));
  const isLight = 0.299 * r + 0.587 * g + 0.114 * b > 130;
  return `background:rgb(${r},${g},${b});color:${isLight ? "#111" : "#fff"}`;
}

// A mask that has blocks of the chosen kind shows those; one that has none of that kind shows what it has.
const HAS_BLOCKS = new Set(TIMED.map(r => r.mask + "\n" + r.blocks));
const fitsBlocks = (record, blocks) => record.blocks === blocks || !HAS_BLOCKS.has(record.mask + "\n" + blocks);

function heatValues(metric) {
  const wanted = TIMED.filter(r => r.direction === $("direction").value && String(r.seqlen) === $("length").value && r.heads === $("heads").value
    && fitsBlocks(r, $("blocks").value));
  const values = new Map();
  for (const record of wanted) {
    const value = metric.get(record), key = record.kernel + "\n" + record.mask, old = values.get(key);
    if (typeof value === "number" && (old === undefined || (metric.low ? value < old : value > old))) values.set(key, value);
  }
  return values;
}

function drawHeat() {
  const metric = METRICS[$("metric").value], values = heatValues(metric), most = Math.max(...values.values(), 0);
  const masks = DATA.masks.filter(mask => RECORDS.some(r => r.mask === mask && isVisible(r)));
  const kernels = DATA.kernels.filter(kernel => RECORDS.some(r => r.kernel === kernel && isVisible(r)));
  const rows = masks.map(mask => make("tr", {}, make("th", { scope: "row" }, mask), ...kernels.map(kernel => heatCell(kernel, mask, metric, values, most))));
  const head = make("tr", {}, make("th", { scope: "col" }, "mask"), ...kernels.map(kernel => make("th", { scope: "col" }, kernel)));
  $("heat").replaceChildren(make("table", { class: "heat" }, make("thead", {}, head), make("tbody", {}, ...rows)));
  const kinds = unique([...CELLS.values()]);
  $("legend").textContent = Object.entries(DATA.marks).filter(([kind]) => kinds.includes(kind)).map(([, mark]) => `${mark.word}: ${mark.meaning}`).join(" · ");
}

function heatCell(kernel, mask, metric, values, most) {
  const key = kernel + "\n" + mask, kind = CELLS.get(key);
  if (kind === undefined) return make("td");
  const value = values.get(key), hasValue = value !== undefined && ["passed", "forward_only", "forward_asked", "partial"].includes(kind);
  const button = make("button", { type: "button", title: `${kernel} on ${mask}` }, hasValue ? metric.text(value) : DATA.marks[kind].word);
  if (hasValue) button.style.cssText = heatColour(most ? value / most : 0);
  button.onclick = () => showDetail(kernel, mask);
  return make("td", { class: kind }, button);
}

// The image of a failing mask, made by the report from the record's tiles and nothing else of it but an escaped title.
function drawn(text) {
  const svg = document.importNode(new DOMParser().parseFromString(text, "image/svg+xml").documentElement, true);
  return make("figure", {}, svg, make("figcaption", { class: "quiet" }, svg.getAttribute("aria-label")));
}

function showDetail(kernel, mask) {
  const records = RECORDS.filter(r => r.kernel === kernel && r.mask === mask);
  const reasons = unique([LACKS.get(kernel + "\n" + mask), ...records.map(r => r.reason)]).filter(Boolean);
  const lines = reasons.map(reason => make("p", { class: "reason" }, reason));
  const replays = unique(records.filter(r => r.kind !== "passed").map(r => r.replay)).filter(Boolean).map(replay => make("p", {}, make("code", {}, replay)));
  const drawings = unique(records.map(r => r.drawing)).filter(Boolean).map(drawn);
  const timed = make("div");
  $("detail").hidden = false;
  $("detail").replaceChildren(make("h3", {}, `${kernel} on ${mask}: ${DATA.marks[CELLS.get(kernel + "\n" + mask)].meaning}`), ...lines, ...replays, make("div", { class: "drawings" }, ...drawings), timed);
  new Table(timed, COLUMNS.slice(2), { page: 12 }).show(records);
}

// Charts ------------------------------------------------------------------------------------------------------------------

const colourOf = i => COLOURS[i % COLOURS.length];

function shape(i, x, y, size) {
  const shapes = [
    `M${x - size} ${y}a${size} ${size} 0 1 0 ${2 * size} 0a${size} ${size} 0 1 0 ${-2 * size} 0`,
    `M${x - size} ${y - size}h${2 * size}v${2 * size}h${-2 * size}z`,
    `M${x} ${y - size * 1.2}l${size * 1.1} ${size * 2}h${-size * 2.2}z`,
    `M${x} ${y - size * 1.3}l${size * 1.3} ${size * 1.3}l${-size * 1.3} ${size * 1.3}l${-size * 1.3} ${-size * 1.3}z`,
    `M${x} ${y + size * 1.2}l${size * 1.1} ${-size * 2}h${-size * 2.2}z`,
  ];
  return shapes[i % shapes.length];
}

function marker(kernel, x, y, size = 4) {
  const i = DATA.kernels.indexOf(kernel);
  return make("path", { d: shape(i, x, y, size), fill: colourOf(i) });
}

function stroke(kernel) {
  const i = DATA.kernels.indexOf(kernel);
  return { stroke: colourOf(i), "stroke-width": 2, fill: "none", ...(i >= COLOURS.length ? { "stroke-dasharray": "6 3" } : {}) };
}

function keys(parent, kernels) {
  parent.replaceChildren(...kernels.map(kernel => make("span", {}, make("svg", { viewBox: "0 0 22 12" },
    make("line", { x1: 0, x2: 22, y1: 6, y2: 6, ...stroke(kernel) }), marker(kernel, 11, 6)), kernel)));
}

// The axis' end: a round number just above the largest value, in steps of ten or, for bytes, of two.
function niceTop(value, base) {
  const unit = base ** Math.floor(Math.log(value || 1) / Math.log(base));
  return unit * (base === 10 ? [1, 1.5, 2, 3, 4, 5, 6, 8, 10] : [1, 1.5, 2]).find(step => step * unit >= value);
}

function lineChart(title, records, get, text, base) {
  const width = 460, height = 240, left = 62, right = 12, top = 10, bottom = 26;
  const lengths = unique(records.map(r => r.seqlen)).sort((a, b) => a - b), most = niceTop(Math.max(...records.map(get)), base);
  const [low, high] = [Math.log2(lengths[0]), Math.log2(lengths[lengths.length - 1])];
  const x = length => high === low ? (left + width - right) / 2 : left + (width - left - right) * (Math.log2(length) - low) / (high - low);
  const y = value => height - bottom - (height - top - bottom) * value / most;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  for (const share of [0, 0.25, 0.5, 0.75, 1]) svg.append(
    make("line", { class: "grid", x1: left, x2: width - right, y1: y(share * most), y2: y(share * most) }),
    make("text", { x: left - 6, y: y(share * most) + 4, "text-anchor": "end" }, text(share * most)));
  let last = -100;
  for (const length of lengths) if (x(length) - last > 34) {
    svg.append(make("text", { x: x(length), y: height - 8, "text-anchor": "middle" }, tokens(length)));
    last = x(length);
  }
  for (const kernel of unique(records.map(r => r.kernel))) svg.append(line(records.filter(r => r.kernel === kernel), kernel, x, y, get, text));
  return make("figure", {}, make("figcaption", {}, title), svg);
}

function line(records, kernel, x, y, get, text) {
  const best = new Map();
  for (const record of records) if (!best.has(record.seqlen) || record.median_ms < best.get(record.seqlen).median_ms) best.set(record.seqlen, record);
  const points = [...best.values()].sort((a, b) => a.seqlen - b.seqlen);
  const group = make("g", {}, make("path", { d: points.map((r, i) => `${i ? "L" : "M"}${x(r.seqlen)} ${y(get(r))}`).join(""), ...stroke(kernel) }));
  for (const record of points) {
    const point = marker(kernel, x(record.seqlen), y(get(record)));
    point.append(make("title", {}, `${kernel} at ${record.seqlen}: ${text(get(record))}`));
    group.append(point);
  }
  return group;
}

function drawLengths() {
  const section = $("lengths");
  const records = TIMED.filter(r => r.seqlen && r.mask === $("chartmask").value && r.heads === $("chartheads").value
    && fitsBlocks(r, $("chartblocks").value) && (!$("kernel").value || r.kernel === $("kernel").value));
  $("chartblocks").parentElement.hidden = !TIMED.some(r => r.mask === $("chartmask").value && r.blocks);
  const charts = [];
  for (const direction of passes(records)) {
    const some = records.filter(r => r.direction === direction), sized = some.filter(r => r.peak_bytes !== null);
    charts.push(lineChart(`${direction}: TFLOP/s`, some, r => r.tflop_per_s, digits, 10));
    if (sized.length) charts.push(lineChart(`${direction}: peak memory`, sized, r => r.peak_bytes, bytes, 2));
  }
  keys(section.querySelector(".keys"), unique(records.map(r => r.kernel)));
  section.querySelector(".charts").replaceChildren(...(charts.length ? charts : [make("p", { class: "quiet" }, "Nothing was timed on this mask.")]));
}

// Context parallel --------------------------------------------------------------------------------------------------------

const POINTS = DATA.scaling ? DATA.scaling.points.map(([setting, mask, direction, line, world, kind, rate]) => ({ setting, mask, direction, line, world, kind, rate })) : [];
const LINES = unique(POINTS.map(p => p.line));
const KINDS = {
  measured: "measured",
  simulated: "simulated: one rank computes, communication is off",
  predicted: "predicted from a rank's measured compute time",
  assumed: "predicted from an assumed compute rate",
};
const isModel = point => ["predicted", "assumed"].includes(point.kind);

// The kernel alone, the last of the lines, is no mechanism and has no colour.
const lineColour = line => line === DATA.scaling.alone ? "currentColor" : colourOf(LINES.indexOf(line));

// Measured is filled, a prediction is open and larger, so that both show where they agree; what was simulated is a cross.
function scalingMark(line, kind, x, y) {
  const i = LINES.indexOf(line), colour = lineColour(line);
  if (kind === "simulated") return make("path", { d: `M${x - 4} ${y - 4}l8 8m0 -8l-8 8`, stroke: colour, "stroke-width": 2, fill: "none" });
  if (kind === "measured") return make("path", { d: shape(i, x, y, 3.5), fill: colour });
  return make("path", { d: shape(i, x, y, 6), class: `open ${kind}`, stroke: colour });
}

function scalingKeys(section) {
  const key = (text, ...marks) => make("span", {}, make("svg", { viewBox: "0 0 22 12" }, ...marks), text);
  const kinds = unique(POINTS.map(p => p.kind)), through = dashes => make("line", { x1: 0, x2: 22, y1: 6, y2: 6, stroke: "currentColor", "stroke-width": 2, ...dashes });
  section.querySelector(".kinds").replaceChildren(
    ...(kinds.includes("measured") ? [key("measured", through({}), make("path", { d: shape(0, 11, 6, 3.5), fill: "currentColor" }))] : []),
    ...["predicted", "assumed"].filter(kind => kinds.includes(kind)).map(kind => key(KINDS[kind], through({ "stroke-dasharray": "5 3" }), make("path", { d: shape(0, 11, 6, 5), class: `open ${kind}`, stroke: "currentColor" }))),
    ...(kinds.includes("simulated") ? [key(KINDS.simulated, make("path", { d: "M7 2l8 8m0 -8l-8 8", stroke: "currentColor", "stroke-width": 2 }))] : []));
  section.querySelector(".lines").replaceChildren(...LINES.filter(line => POINTS.some(p => p.line === line && p.setting === $("scalingsetting").value))
    .map(line => key(line, make("path", { d: shape(LINES.indexOf(line), 11, 6, 4.5), fill: lineColour(line) }))));
}

// Ends of an axis that holds all values in about four round steps: from 0 where that costs little, and never so narrow that noise fills it.
function niceRange(values) {
  const low = Math.min(...values), high = Math.max(...values), from = low < 0.4 * high ? 0 : low;
  const rough = Math.max(high - from, high * 0.1) / 4, unit = 10 ** Math.floor(Math.log10(rough)), step = unit * [1, 2, 2.5, 5, 10].find(s => s * unit >= rough);
  const end = Math.ceil(high / step) * step;
  return { step, low: Math.max(0, Math.min(Math.floor(from / step) * step, end - 4 * step)), high: end };
}

function scalingChart(title, points) {
  const width = 460, height = 240, left = 48, right = 24, top = 10, bottom = 26;
  const worlds = unique(points.map(p => p.world)).sort((a, b) => a - b), lines = LINES.filter(line => points.some(p => p.line === line));
  const range = niceRange(points.map(p => p.rate)), [first, last] = [Math.log2(worlds[0]), Math.log2(worlds[worlds.length - 1])];
  const across = world => first === last ? (left + width - right) / 2 : left + 24 + (width - left - right - 48) * (Math.log2(world) - first) / (last - first);
  const x = point => across(point.world) + 4 * (lines.indexOf(point.line) - (lines.length - 1) / 2); // side by side, as many are alike
  const y = rate => height - bottom - (height - top - bottom) * (rate - range.low) / (range.high - range.low);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  for (let rate = range.low; rate <= range.high * 1.0001; rate += range.step) svg.append(
    make("line", { class: "grid", x1: left, x2: width - right, y1: y(rate), y2: y(rate) }),
    make("text", { x: left - 6, y: y(rate) + 4, "text-anchor": "end" }, digits(rate)));
  for (const world of worlds) svg.append(make("text", { x: across(world), y: height - 8, "text-anchor": "middle" }, `${world} GPUs`));
  for (const [wanted, dashes] of [[isModel, { "stroke-dasharray": "5 3", "stroke-width": 1 }], [p => p.kind === "measured", { "stroke-width": 2 }]]) for (const line of lines) {
    const some = points.filter(p => p.line === line && wanted(p)).sort((a, b) => a.world - b.world);
    svg.append(make("path", { d: some.map((p, i) => `${i ? "L" : "M"}${x(p)} ${y(p.rate)}`).join(""), fill: "none", stroke: lineColour(line), ...dashes }));
  }
  for (const point of [...points].sort((a, b) => isModel(b) - isModel(a))) {
    const mark = scalingMark(point.line, point.kind, x(point), y(point.rate));
    mark.append(make("title", {}, `${point.line}, ${point.world} GPUs: ${digits(point.rate)} TFLOP/s per GPU, ${KINDS[point.kind]}`));
    svg.append(mark);
  }
  return make("figure", {}, make("figcaption", {}, title), svg);
}

function drawScaling() {
  const section = $("scaling"), points = POINTS.filter(p => p.setting === $("scalingsetting").value && (!$("mask").value || p.mask === $("mask").value));
  section.hidden = !POINTS.length;
  if (section.hidden) return;
  const panels = DATA.masks.flatMap(mask => PASSES.map(direction => [`${mask}, ${direction}: TFLOP/s per GPU`, points.filter(p => p.mask === mask && p.direction === direction)]));
  const charts = panels.filter(([, some]) => some.length).map(([title, some]) => scalingChart(title, some));
  scalingKeys(section);
  section.querySelector(".charts").replaceChildren(...(charts.length ? charts : [make("p", { class: "quiet" }, "Nothing was timed on this mask.")]));
  section.querySelector(".errors").replaceChildren(...DATA.scaling.errors.map(text => make("p", { class: "quiet" }, text)));
}

const TENSORS = ["out", "lse", "dq", "dk", "dv"];

function drawErrors() {
  const kernels = DATA.kernels.filter(kernel => RECORDS.some(r => r.kernel === kernel && isVisible(r) && r.errors.length)), section = $("error");
  const names = unique(RECORDS.flatMap(r => r.errors.map(([tensor]) => tensor))).sort((a, b) => TENSORS.indexOf(a) - TENSORS.indexOf(b));
  const colour = tensor => COLOURS[names.indexOf(tensor) % COLOURS.length];
  const worst = new Map();
  for (const record of RECORDS.filter(isVisible)) for (const [tensor, value] of record.errors) {
    const key = [record.kernel, record.mask, tensor].join("\n"), error = value === "infinite" ? Infinity : value;
    if (error !== null && !(worst.get(key) >= error)) worst.set(key, error);
  }
  section.hidden = !worst.size;
  const width = Math.max(320, Math.min(960, section.clientWidth || 960)), left = 100, row = 24, height = kernels.length * row + 30;
  const x = error => left + (width - left - 20) * (Math.log10(Math.min(100, Math.max(1e-4, error))) + 4) / 6;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "error over limit for each kernel" });
  for (const power of [-4, -3, -2, -1, 0, 1, 2]) svg.append(
    make("line", { class: power ? "grid" : "limit", x1: x(10 ** power), x2: x(10 ** power), y1: 4, y2: height - 22 }),
    make("text", { x: x(10 ** power), y: height - 8, "text-anchor": "middle" }, power ? power === 2 ? "100+" : String(10 ** power) : "limit"));
  kernels.forEach((kernel, i) => svg.append(make("text", { x: left - 8, y: i * row + 20, "text-anchor": "end" }, kernel)));
  for (const [key, error] of worst) {
    const [kernel, mask, tensor] = key.split("\n"), place = kernels.indexOf(kernel) * row + 10 + 3 * names.indexOf(tensor) % 15;
    svg.append(make("circle", { cx: x(error), cy: place, r: 2.6, fill: colour(tensor), "fill-opacity": 0.8 }, make("title", {}, `${kernel} ${mask} ${tensor}: ${digits(error)}`)));
  }
  section.querySelector(".keys").replaceChildren(...names.map(tensor => make("span", {}, make("svg", { viewBox: "0 0 22 12" }, make("circle", { cx: 11, cy: 6, r: 4, fill: colour(tensor) })), tensor)));
  section.querySelector(".charts").replaceChildren(svg);
}

// Failures ----------------------------------------------------------------------------------------------------------------

const FAILED = RECORDS.filter(r => DATA.marks[r.kind].colour === "red"), SHOWN_FAILURES = 20;

// One for each kernel and reason, with the first drawing and replay that a record of it has.
function failures() {
  const groups = new Map();
  for (const record of FAILED.filter(isVisible)) {
    const key = record.kernel + "\n" + record.reason;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(record);
  }
  return [...groups.values()];
}

function copied(text) {
  const code = make("code", {}, text), button = make("button", { type: "button" }, "Copy");
  button.onclick = () => {
    getSelection().selectAllChildren(code);
    button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
  };
  return make("p", { class: "replay" }, button, code);
}

function failure(records) {
  const first = records[0], replay = records.map(r => r.replay).find(Boolean), drawing = records.map(r => r.drawing).find(Boolean);
  const title = `${first.kernel} on ${unique(records.map(r => r.mask)).join(", ")}: ${DATA.marks[first.kind].meaning}`;
  return make("article", { class: "failure" }, make("h3", {}, title), make("p", { class: "reason" }, first.reason),
    replay ? copied(replay) : null, drawing ? make("div", { class: "drawings" }, drawn(drawing)) : null);
}

function drawFailures(shown = SHOWN_FAILURES) {
  $("failures").hidden = !FAILED.length;
  const found = failures(), articles = found.slice(0, shown).map(failure);
  if (shown < found.length) {
    const more = make("button", { type: "button" }, `Show more (${found.length - shown} hidden)`);
    more.onclick = () => drawFailures(shown + SHOWN_FAILURES);
    articles.push(more);
  }
  $("failures").querySelector("div").replaceChildren(...(found.length ? articles : [make("p", { class: "quiet" }, "None among the records shown.")]));
}

// The other sections ------------------------------------------------------------------------------------------------------

// Two kernels whose middle samples overlap are tied: which is the faster one would be noise.
function fastestRows() {
  const groups = new Map();
  for (const record of TIMED.filter(isVisible)) {
    const key = [record.mask, record.case, record.direction, record.world].join("\n");
    groups.set(key, [...(groups.get(key) || []), record]);
  }
  const rows = [...groups.values()].map(ranked => {
    const [best, ...others] = ranked.sort((a, b) => a.median_ms - b.median_ms);
    const ties = others.filter(r => r.p20_ms <= best.p80_ms && best.p20_ms <= r.p80_ms), slower = others.find(r => !ties.includes(r));
    const next = slower && `${slower.kernel} (${digits(slower.median_ms / best.median_ms)}x the time)`;
    return { ...best, second: [ties.length && "tied with " + ties.map(r => r.kernel).join(" and "), next].filter(Boolean).join(", then ") };
  });
  const order = r => [-r.seqlen, DATA.masks.indexOf(r.mask), PASSES.indexOf(r.direction)];
  return rows.sort((a, b) => order(a).map((x, i) => x - order(b)[i]).find(Boolean) || 0);
}

function drawGallery() {
  const figures = [...DATA.pictures].sort((a, b) => DATA.masks.indexOf(a.mask) - DATA.masks.indexOf(b.mask)).filter(picture => !$("mask").value || picture.mask === $("mask").value).map(({ mask, source, rows, density }) => {
    const path = rows.map((row, i) => [...row.matchAll(/1+/g)].map(run => `M${run.index} ${i}h${run[0].length}v1h${-run[0].length}z`).join("")).join("");
    const width = rows.length ? rows[0].length : 1;
    return make("figure", {}, make("figcaption", {}, mask), make("svg", { viewBox: `0 0 ${width} ${Math.max(rows.length, 1)}`, preserveAspectRatio: "none", role: "img", "aria-label": mask, "shape-rendering": "crispEdges" }, make("path", { d: path })),
      density === null ? null : make("span", { class: "quiet" }, `${percent(density)} visible`), make("code", { title: source }, source));
  });
  $("gallery").hidden = !figures.length;
  $("gallery").querySelector(".gallery").replaceChildren(...figures);
}

function drawGate() {
  if (!DATA.gate) return;
  $("gate").hidden = false;
  $("verdict").textContent = DATA.gate.conclusion;
  $("basis").textContent = DATA.gate.basis;
  $("verdict").className = DATA.gate.exit_code ? "fails" : "";
  const find = $("find").value.trim().toLowerCase();
  GATE.show(DATA.gate.rows.filter(row => row.slice(0, 3).some(text => text.toLowerCase().includes(find))
    && ["kernel", "mask"].every(name => !$(name).value || row[1].includes($(name).value))));
}

const RANKS = RECORDS.some(r => r.world > 1) ? [number("world", "ranks")] : [];
const OF_DEVICE = [optional(number("of_peak", "of peak", percent)), optional(number("peak_bytes", "memory", bytes))];
const COLUMNS = filled([
  plain("kernel"), plain("mask"), plain("stage"),
  { name: "outcome", get: word, text: value => value, style: tone },
  { name: "pass", get: r => r.direction, text: value => value },
  plain("shape"), ...RANKS, number("examples", "cases"), number("median_ms", "ms"),
  { name: "p20 to p80", get: r => r.p20_ms, number: true, node: r => r.p20_ms === null ? "" : `${digits(r.p20_ms)} to ${digits(r.p80_ms)}` },
  number("tflop_per_s", "TFLOP/s"), ...OF_DEVICE, number("error", "error / limit"),
], RECORDS);

const RECORD_TABLE = new Table($("records").querySelector("div"), COLUMNS, { page: 50, below: why });
const FASTEST = new Table($("fastest").querySelector("div"), filled([
  plain("mask"), plain("kernel"), number("tflop_per_s", "TFLOP/s"), number("median_ms", "ms"), optional({ name: "next", get: r => r.second, text: value => value }),
  { name: "pass", get: r => r.direction, text: value => value }, plain("shape"), ...RANKS, ...OF_DEVICE,
], fastestRows()), { page: 28 });
const PLAN = new Table($("plan").querySelector("div"), filled([
  plain("kernel"), plain("mask"), plain("shape"), { name: "pass", get: r => r.direction, text: value => value }, number("plan_ms", "plan (ms)"),
  { name: "in calls", get: r => r.median_ms ? r.plan_ms / r.median_ms : null, number: true }, optional(number("compile_ms", "compile (ms)")), optional(number("launch_ms", "launch (ms)")), number("median_ms", "call (ms)"),
], RECORDS), { page: 12, sort: 4, descending: true });
const GATE = new Table($("gate").querySelector("div"), filled([
  { name: "verdict", get: r => r[0], text: value => value, style: r => r[0] === "ok" ? "good" : "bad" },
  { name: "case", get: r => r[1], node: r => make("div", { class: "reason" }, make("code", {}, r[1])) },
  ...["time", "memory", "error"].map((name, i) => optional({ name, get: r => r[3 + i], number: true, text: signed })),
], DATA.gate ? DATA.gate.rows : []), { page: 15, below: r => r[2] ? make("div", { class: "reason" }, r[2]) : null });

function drawAll() {
  const visible = RECORDS.filter(isVisible);
  drawFailures();
  drawGate();
  drawHeat();
  drawLengths();
  drawScaling();
  FASTEST.show(fastestRows());
  drawErrors();
  PLAN.show(visible.filter(r => r.plan_ms !== null));
  drawGallery();
  RECORD_TABLE.show(visible);
  document.documentElement.dataset.records = String(visible.length);
}

function start() {
  const lengths = unique(TIMED.map(r => r.seqlen)).filter(Boolean).sort((a, b) => a - b), heads = unique(TIMED.map(r => r.heads)).sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
  const blocks = unique(TIMED.map(r => r.blocks)).filter(Boolean).sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
  options($("kernel"), DATA.kernels, "all");
  options($("mask"), DATA.masks, "all");
  options($("kind"), unique(RECORDS.map(r => r.kind)), "all", kind => DATA.marks[kind].meaning);
  options($("metric"), Object.keys(METRICS).filter(name => name === "outcome" || TIMED.some(r => METRICS[name].get(r) !== null)), null, name => METRICS[name].label);
  options($("direction"), passes(TIMED), null);
  options($("length"), lengths, null, tokens);
  options($("heads"), heads, null);
  options($("chartmask"), DATA.masks.filter(mask => TIMED.some(r => r.mask === mask && r.seqlen)), null);
  options($("chartheads"), heads, null);
  for (const name of ["blocks", "chartblocks"]) options($(name), blocks, null);
  options($("scalingsetting"), unique(POINTS.map(p => p.setting)), null);
  if (lengths.length) $("metric").value = "tflop_per_s";
  if (lengths.length) $("length").value = String(lengths[lengths.length - 1]);
  for (const name of ["direction", "length", "heads"]) $(name).parentElement.hidden = !lengths.length;
  $("blocks").parentElement.hidden = !blocks.length;
  $("lengths").hidden = !lengths.length;
  $("fastest").hidden = !TIMED.length;
  $("rough").hidden = !TIMED.some(r => r.is_rough);
  $("plan").hidden = !RECORDS.some(r => r.plan_ms !== null);
  for (const name of ["metric", "direction", "length", "heads", "blocks"]) $(name).onchange = drawHeat;
  for (const name of ["chartmask", "chartheads", "chartblocks"]) $(name).onchange = drawLengths;
  $("scalingsetting").onchange = drawScaling;
  $("filters").oninput = drawAll;
  $("filters").onreset = () => setTimeout(drawAll);
  $("filters").onsubmit = event => event.preventDefault();
  drawAll();
  document.querySelector("nav").append(...[...document.querySelectorAll("section")].filter(section => !section.hidden).map(section => make("a", { href: "#" + section.id }, section.querySelector("h2").textContent)));
}

start();
document.documentElement.dataset.ms = String(Math.round(performance.now()));
