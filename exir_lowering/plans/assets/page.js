"use strict";
// All names come from the plan: they reach the page through textContent and setAttribute only, never as HTML.

const plan = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const graph = byId("graph"), panel = byId("panel");
const ROWS = 200, ITEMS = 30, COLOURS = 8;
let method, vertices, boxes, neighbours, shown;

// -- making elements and words ---------------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== "" && child != null));
  return element;
}

const count = (number) => number.toLocaleString("en");
const many = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
const percent = (share) => (share === null ? "none" : `${(100 * share).toFixed(1)} %`);

function scaled(number, units) {
  let unit = 0;
  while (number >= 999.95 && unit < units.length - 1) { number /= 1000; unit += 1; }
  return `${unit ? number.toFixed(1) : number} ${units[unit]}`.trim();
}

const size = (bytes) => scaled(bytes, ["B", "kB", "MB", "GB", "TB"]);
const duration = (seconds) => {
  if (!seconds) return "0 s";
  const [unit, factor] = [["s", 1], ["ms", 1e3], ["us", 1e6]].find(([, each]) => seconds * each >= 0.9995) ?? ["ns", 1e9];
  return `${(seconds * factor).toFixed(unit === "ns" ? 0 : 1)} ${unit}`;
};
const operations = (flops) => scaled(flops, ["", "k", "M", "G", "T", "P"]);

function middle(text, width) {
  if (text.length <= width) return text;
  const back = Math.floor((width - 1) / 2);
  return `${text.slice(0, width - 1 - back)}…${text.slice(text.length - back)}`;
}

function colour(backend) {
  return backend === null ? "host" : `b${plan.backends.indexOf(backend) % COLOURS}`;
}

/* A list that starts short and shows the rest when asked. */
function list(items, render, limit = ITEMS, tag = "ul") {
  const element = make(tag, { class: "plain" }, items.slice(0, limit).map((item) => make("li", {}, render(item))));
  if (items.length <= limit) return [element];
  const more = make("button", { type: "button", click: () => {
    element.append(...items.slice(limit).map((item) => make("li", {}, render(item))));
    more.remove();
  } }, `Show all ${count(items.length)}`);
  return [element, more];
}

const link = (text, action) => make("button", { type: "button", class: "link", click: action }, text);
const figures = (rows) => make("dl", {}, rows.map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));

// -- a method --------------------------------------------------------------------------------------------------------

function showMethod(index) {
  method = plan.methods[index];
  const picture = method.picture;
  vertices = new Map(picture.vertices.map((vertex) => [vertex.id, vertex]));
  neighbours = new Map(picture.vertices.map((vertex) => [vertex.id, { above: [], below: [] }]));
  for (const edge of picture.edges) {
    neighbours.get(edge.source).below.push(edge);
    neighbours.get(edge.target).above.push(edge);
  }
  method.of = new Map(picture.vertices.flatMap((vertex) => vertex.nodes.map((name) => [name, vertex.id])));
  method.named = new Map(method.nodes.map((node) => [node.name, node]));
  method.refusals = new Map(method.host.map((node) => [node.node, node]));
  showSummary();
  showGraph(picture);
  select(null);
  byId("filter").value = "";
  showHost();
  showLists();
}

function showSummary() {
  const delegated = method.nodes.length - method.host.length;
  const sum = (parts) => parts.reduce((total, part) => total + part.flops, 0);
  const rows = [
    ["Operators", method.coverage.operators, `${count(delegated)} of ${count(method.nodes.length)} in partitions`],
    ["Floating-point operations", method.coverage.flops, `${operations(sum(method.partitions))} of ${operations(sum(method.nodes))} in partitions`],
    ["Weights", method.coverage.weights, `${size(method.delegated_weight_bytes)} of ${size(method.weight_bytes)} read by partitions`],
  ];
  const meters = rows.map(([name, share, text]) => {
    const filled = make("div");
    filled.style.width = `${100 * (share ?? 0)}%`;
    const meter = make("div", { class: "meter", role: "img", "aria-label": `${name}: ${percent(share)}` }, filled);
    const figure = make("div", { class: "figure" }, make("span", {}, name), make("b", {}, percent(share)));
    return make("div", {}, figure, meter, make("span", { class: "soft" }, share === null ? "there are none" : text));
  });
  const counts = new Map();
  for (const partition of method.partitions) counts.set(partition.backend_id, (counts.get(partition.backend_id) ?? 0) + 1);
  const figure = make("div", { class: "figure" }, make("span", {}, "Partitions"), make("b", {}, count(method.partitions.length)));
  const text = [...counts].map(([backend, number]) => `${count(number)} × ${backend}`).join(", ");
  const partitions = make("div", {}, figure, make("span", { class: "soft" }, text));
  byId("summary").replaceChildren(...meters, partitions, predictedLatency());
}

function predictedLatency() {
  const { seconds, host_seconds, delegate_seconds, crossing_seconds, guessed } = method.prediction;
  const figure = make("div", { class: "figure" }, make("span", {}, "Predicted latency"), make("b", {}, duration(seconds)));
  const shares = `host ${duration(host_seconds)}, delegates ${duration(delegate_seconds)}, data between them ${duration(crossing_seconds)}`;
  const guesses = guessed ? `; ${many(guessed, "operator")} without a cost, taken from the default model` : "";
  return make("div", {}, figure, make("span", { class: "soft" }, shares + guesses));
}

// -- the graph -------------------------------------------------------------------------------------------------------

function showGraph(picture) {
  const empty = picture.vertices.length === 0;
  graph.toggleAttribute("hidden", empty);
  byId("keys").hidden = empty;
  byId("no-graph").hidden = !empty;
  byId("drawing").classList.toggle("empty", empty);
  const found = new Set(picture.vertices.map((vertex) => vertex.backend));
  const backends = [...plan.backends, null].filter((backend) => found.has(backend));
  byId("legend").replaceChildren(...backends.map((backend) => make("li", {}, sample(backend), backend ?? "host")));
  const edges = picture.edges.map(drawEdge);
  boxes = new Map(picture.vertices.map((vertex) => [vertex.id, drawBox(vertex)]));
  boxes.values().next().value?.setAttribute("tabindex", "0");
  const group = (items) => draw("g", {}, items);
  graph.replaceChildren(group(edges), group([...boxes.values()]), group(picture.edges.filter((e) => e.bytes).map(drawBytes)));
  start();
}

function sample(backend) {
  const rect = draw("rect", { x: 1, y: 1, width: 18, height: 11, rx: 2, class: colour(backend) });
  return draw("svg", { viewBox: "0 0 20 13", "aria-hidden": "true" }, rect);
}

function drawBox(vertex) {
  const { width, height } = plan.box;
  const box = draw(
    "g",
    { class: `box ${colour(vertex.backend)}`, transform: `translate(${vertex.x} ${vertex.y})`, role: "button",
      tabindex: "-1", "aria-pressed": "false", "aria-label": `${vertex.title}: ${vertex.label}` },
    draw("title", {}, `${vertex.title}\n${vertex.label}`),
    draw("rect", { x: -width / 2, y: -height / 2, width, height, rx: 7 }),
    draw("text", { class: "name", y: -5 }, middle(vertex.title, 26)),
    draw("text", { class: "who", y: 15 }, middle(vertex.label, 31)),
  );
  box.vertex = vertex;
  return box;
}

/* A line that passes too many rows to go between the boxes is two stubs, and whole when one of its ends is selected. */
function isFar(edge) {
  return edge.points.length === 2 && vertices.get(edge.target).rank - vertices.get(edge.source).rank > 1;
}

function drawEdge(edge) {
  const [[x, y], ...rest] = edge.points;
  let path = `M${x} ${y}`, before = [x, y];
  for (const [toX, toY] of rest) {
    const half = (before[1] + toY) / 2;
    path += toX === before[0] ? `V${toY}` : `C${before[0]} ${half} ${toX} ${half} ${toX} ${toY}`;
    before = [toX, toY];
  }
  const tip = draw("path", { class: "tip", d: `M${before[0]} ${before[1]}l-4 -8h8z` });
  const far = isFar(edge);
  const stubs = far ? draw("path", { class: "stub", d: `M${x} ${y}v22M${before[0]} ${before[1]}v-22` }) : "";
  const what = edge.bytes ? `: ${size(edge.bytes)}` : "";
  const words = `${vertices.get(edge.source).title} to ${vertices.get(edge.target).title}${what}`;
  edge.drawn = draw("g", { class: `edge${far ? " far" : ""}${edge.bytes ? "" : " bare"}` }, draw("title", {}, words), draw("path", { d: path }), stubs, tip);
  return edge.drawn;
}

function drawBytes(edge) {
  const above = [...neighbours.get(edge.target).above].sort((a, b) => a.points.at(-1)[0] - b.points.at(-1)[0]);
  const [x, y] = edge.points.at(-1);
  const lift = 13 + 14 * (above.indexOf(edge) % 2);
  const crowded = above.length > 4 ? " crowded" : "";
  edge.text = draw("text", { class: `bytes${crowded}`, x, y: y - lift }, size(edge.bytes));
  return edge.text;
}

/* What is seen: the corner, and how many pixels a unit has. */
const view = { x: 0, y: 0, scale: 1 };

function applyView() {
  const { width, height } = graph.getBoundingClientRect();
  if (!width) return;
  graph.setAttribute("viewBox", `${view.x} ${view.y} ${width / view.scale} ${height / view.scale}`);
  graph.classList.toggle("tiny", view.scale < 0.4);
}

function centre(x, y, scale) {
  const { width, height } = graph.getBoundingClientRect();
  Object.assign(view, { scale, x: x - width / scale / 2, y: y - height / scale / 2 });
  applyView();
}

function fit() {
  const { width, height } = graph.getBoundingClientRect(), picture = method.picture;
  centre(picture.width / 2, picture.height / 2, Math.min(width / picture.width, height / picture.height, 1) || 1);
}

/* All of it when it can be read, else its top. */
function start() {
  fit();
  if (view.scale >= 0.5) return;
  const { width, height } = graph.getBoundingClientRect(), picture = method.picture;
  const scale = Math.min(1, Math.max(0.5, width / picture.width));
  const top = picture.vertices.filter((vertex) => vertex.rank === 0);
  centre(top.reduce((sum, vertex) => sum + vertex.x, 0) / top.length, height / scale / 2, scale);
}

/* Scale around a point of the window. */
function zoom(factor, clientX, clientY) {
  const { left, top, width, height } = graph.getBoundingClientRect();
  const x = (clientX ?? left + width / 2) - left, y = (clientY ?? top + height / 2) - top;
  const scale = Math.min(4, Math.max(0.01, view.scale * factor));
  view.x += x / view.scale - x / scale;
  view.y += y / view.scale - y / scale;
  view.scale = scale;
  applyView();
}

function reveal(vertex) {
  const { width, height } = graph.getBoundingClientRect();
  const x = (vertex.x - view.x) * view.scale, y = (vertex.y - view.y) * view.scale;
  const seen = x > 40 && x < width - 40 && y > 30 && y < height - 30;
  if (!seen || view.scale < 0.5) centre(vertex.x, vertex.y, Math.max(view.scale, 0.8));
}

const pointers = new Map();
let travelled = 0;

graph.addEventListener("wheel", (event) => {
  event.preventDefault();
  zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0015)), event.clientX, event.clientY);
}, { passive: false });

graph.addEventListener("pointerdown", (event) => {
  if (event.button) return;
  if (!pointers.size) travelled = 0;
  pointers.set(event.pointerId, event);
});

graph.addEventListener("pointermove", (event) => {
  const before = pointers.get(event.pointerId);
  if (!before) return;
  const x = event.clientX - before.clientX, y = event.clientY - before.clientY;
  travelled += Math.abs(x) + Math.abs(y);
  if (travelled > 4) {
    graph.setPointerCapture(event.pointerId);
    graph.classList.add("moving");
  }
  pointers.set(event.pointerId, event);
  const other = [...pointers.values()].find((pointer) => pointer.pointerId !== event.pointerId);
  if (other) {
    const distance = (p) => Math.hypot(p.clientX - other.clientX, p.clientY - other.clientY) || 1;
    zoom(distance(event) / distance(before), other.clientX, other.clientY);
  } else {
    view.x -= x / view.scale;
    view.y -= y / view.scale;
    applyView();
  }
});

for (const name of ["pointerup", "pointercancel", "lostpointercapture"]) {
  graph.addEventListener(name, (event) => {
    pointers.delete(event.pointerId);
    if (!pointers.size) graph.classList.remove("moving");
  });
}
window.addEventListener("pointerup", (event) => pointers.delete(event.pointerId));

graph.addEventListener("click", (event) => {
  const box = event.target.closest(".box");
  if (box && travelled <= 4) select(box.vertex.id);
});

/* One vertex is a tab stop; the arrows go along the edges and along the row. */
graph.addEventListener("keydown", (event) => {
  const box = event.target.closest(".box");
  if (!box) return;
  const { id, rank, x } = box.vertex, near = neighbours.get(id);
  const row = method.picture.vertices.filter((vertex) => vertex.rank === rank).sort((a, b) => a.x - b.x);
  const place = row.findIndex((vertex) => vertex.id === id);
  const away = (vertex) => [Math.abs(vertex.rank - rank), Math.abs(vertex.x - x)];
  const nearer = (a, b) => away(a)[0] - away(b)[0] || away(a)[1] - away(b)[1];
  const closest = (ids) => ids.map((other) => vertices.get(other)).sort(nearer)[0];
  const targets = {
    ArrowDown: () => closest(near.below.map((edge) => edge.target)),
    ArrowUp: () => closest(near.above.map((edge) => edge.source)),
    ArrowLeft: () => row[place - 1],
    ArrowRight: () => row[place + 1],
    Enter: () => select(id),
    " ": () => select(id),
  };
  if (!(event.key in targets)) return;
  event.preventDefault();
  const target = targets[event.key]();
  if (target) focus(target);
});

function focus(vertex) {
  for (const box of boxes.values()) box.setAttribute("tabindex", box.vertex === vertex ? "0" : "-1");
  reveal(vertex);
  boxes.get(vertex.id).focus({ preventScroll: true });
}

// Not on the graph itself: a listener for the focus makes an SVG element a tab stop.
byId("canvas").addEventListener("focusin", (event) => {
  const box = event.target.closest(".box");
  if (box && box.matches(":focus-visible")) reveal(box.vertex);
});

// -- the panel -------------------------------------------------------------------------------------------------------

function select(id, jump = false) {
  for (const [other, box] of boxes) {
    box.classList.toggle("selected", other === id);
    box.setAttribute("aria-pressed", String(other === id));
    if (id !== null) box.setAttribute("tabindex", other === id ? "0" : "-1");
  }
  for (const edge of method.picture.edges) {
    const near = edge.source === id || edge.target === id;
    edge.drawn.classList.toggle("near", near);
    edge.text?.classList.toggle("near", near);
    if (near) edge.drawn.parentNode.append(edge.drawn); // on top
  }
  panel.replaceChildren(...(id === null ? overview() : details(vertices.get(id))));
  panel.scrollTop = 0;
  if (!jump) return;
  reveal(vertices.get(id));
  byId("drawing").scrollIntoView({ block: "nearest" });
}

const jump = (vertex) => link(vertex.title, () => select(vertex.id, true));

function overview() {
  const partitions = method.picture.vertices.filter((vertex) => vertex.kind === "partition");
  const regions = method.picture.vertices.filter((vertex) => vertex.kind === "host");
  const row = (vertex) => [jump(vertex), make("div", { class: "soft" }, vertex.label)];
  const part = (title, items) => (items.length ? [make("h3", {}, `${title} (${count(items.length)})`), list(items, row)] : []);
  const hint = method.picture.vertices.length ? "Select a box of the graph to see its operators." : "There is nothing to select.";
  return [make("p", { class: "soft" }, hint), part("Partitions", partitions), part("Host regions", regions)].flat(Infinity);
}

function details(vertex) {
  const partition = method.partitions.find((each) => vertex.kind === "partition" && each.id === vertex.title);
  const names = new Set(vertex.nodes);
  const adjusted = method.adjustments.filter((adjustment) => adjustment.nodes.some((name) => names.has(name)));
  const refused = partition ? method.refused_merges.filter((each) => each.first === partition.id || each.second === partition.id) : [];
  const { above, below } = neighbours.get(vertex.id);
  const part = (title, items, render, limit, tag) =>
    items.length ? [make("h3", {}, title), list(items, render, limit, tag)] : [];
  const edge = (end) => (each) => [jump(vertices.get(each[end])), ` ${size(each.bytes)}`];
  return [
    make("h2", { id: "panel-title" }, vertex.title),
    figures(partition ? partitionFigures(partition) : [["Runs on", "the host"], ["Operators", count(vertex.nodes.length)]]),
    part("Cannot be one partition", refused, (each) => refusal(each, partition.id)),
    part("Dropped or cut", adjusted, adjustment),
    part("Reads from", above, edge("source"), 6),
    part("Read by", below, edge("target"), 6),
    part(`Operators (${count(vertex.nodes.length)})`, vertex.nodes, operator, 500, "ol"),
  ].flat(Infinity);
}

function partitionFigures(partition) {
  const counts = Object.entries(partition.operators).sort((a, b) => b[1] - a[1]);
  return [
    ["Runs on", partition.backend_id],
    ["Weights", size(partition.weight_bytes)],
    ["In", size(partition.bytes_in)],
    ["Out", size(partition.bytes_out)],
    ["Flops", operations(partition.flops)],
    ["Operators", counts.map(([name, number]) => `${count(number)} × ${name}`).join(", ")],
  ];
}

function operator(name) {
  const node = method.named.get(name), refused = method.refusals.get(name);
  const soft = (text) => (text ? make("div", { class: "soft" }, text) : "");
  return [
    make("code", { class: "node" }, name), " ", make("span", {}, node.operator),
    (refused?.reasons ?? []).map((reason) => make("div", {}, reason.reason, make("span", { class: "soft" }, ` [${reason.by}]`))),
    soft(node.module && `in ${node.module}`),
    soft(node.source),
  ];
}

function adjustment(each) {
  const about = each.nodes.length > 1 ? `${many(each.nodes.length, "node")} from ${each.nodes[0]} to ${each.nodes.at(-1)}` : each.nodes[0] ?? "nothing";
  const to = method.of.get(each.nodes[0]);
  return [`${each.kind} `, to ? link(about, () => select(to, true)) : about, `: ${each.reason} `, make("span", { class: "soft" }, `[${each.by}]`)];
}

function refusal(each, own) {
  const name = (id) => {
    const vertex = vertices.get(`partition:${id}`);
    return vertex && id !== own ? jump(vertex) : id;
  };
  const path = own === undefined && each.path.length > 6
    ? [...each.path.slice(0, 3), `(${count(each.path.length - 6)} more)`, ...each.path.slice(-3)] : each.path;
  const route = make("div", { class: "soft" }, path.length ? `because of ${path.join(" → ")}` : "");
  return own === undefined
    ? [name(each.first), " and ", name(each.second), route]
    : ["with ", name(each.first === own ? each.second : each.first), route];
}

// -- the host's operators and the lists ------------------------------------------------------------------------------

const order = { column: null, down: false };
const collator = new Intl.Collator("en", { numeric: true });
const columns = [
  ["Operator", (node) => node.operator],
  ["Name", (node) => node.node],
  ["Reason", (node) => [...new Set(node.reasons.map((reason) => reason.reason))].join("; ")],
  ["By", (node) => [...new Set(node.reasons.map((reason) => reason.by))].join(", ")],
  ["Module", (node) => node.module],
  ["Source", (node) => node.source],
];

function showHost(limit = ROWS) {
  byId("host-section").hidden = method.host.length === 0;
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = method.host
    .map((node) => ({ node, cells: columns.map(([, text]) => text(node)) }))
    .filter(({ cells }) => words.every((word) => cells.some((cell) => cell.toLowerCase().includes(word))));
  if (order.column !== null) {
    const sign = order.down ? -1 : 1;
    rows.sort((a, b) => sign * collator.compare(a.cells[order.column], b.cells[order.column]));
  }
  byId("host-count").textContent = `${count(rows.length)} of ${many(method.host.length, "operator")}`;
  byId("host").replaceChildren(heads(), make("tbody", {}, rows.slice(0, limit).map(hostRow)));
  const more = byId("host-more");
  more.hidden = rows.length <= limit;
  more.textContent = `Show all ${count(rows.length)}`;
}

function heads() {
  return make("thead", {}, make("tr", {}, columns.map(([name], column) => {
    const sorted = order.column !== column ? "none" : order.down ? "descending" : "ascending";
    const sort = () => {
      Object.assign(order, { down: order.column === column && !order.down, column });
      showHost();
      byId("host").querySelectorAll("th button")[column].focus();
    };
    return make("th", { scope: "col", "aria-sort": sorted }, make("button", { type: "button", click: sort }, name));
  })));
}

function hostRow({ node, cells }) {
  return make("tr", {}, cells.map((cell, column) => {
    const name = columns[column][0];
    return make("td", { "data-label": name }, name === "Name" ? link(cell, () => select(method.of.get(node.node), true)) : cell);
  }));
}

function hostCost(each) {
  const head = `${duration(each.seconds)}, ${count(each.count)} × ${each.operator}`;
  return [head, make("div", { class: "soft" }, each.would_remove || "no reason given")];
}

function rewriting([times, what, place]) {
  return [`${times} ${what}`, make("div", { class: "soft" }, place)];
}

function showLists() {
  const says = (each) => `allowing ${each.operators.join(" and ")} in ${each.backend_id} would merge ${each.before} partitions into ${each.after}`;
  const parts = [
    ["Largest costs on the host", method.prediction.largest, hostCost],
    ["Advice", method.advice, says],
    [`Rewritten: ${method.rewritten.saving}`, method.rewritten.done, rewriting, method.rewritings.length],
    ["Not rewritten", method.rewritten.refused, rewriting, method.refused_rewrites.length],
    ["Dropped or cut", method.adjustments, adjustment],
    ["Cannot be one partition", method.refused_merges, (each) => refusal(each)],
  ].filter(([, items]) => items.length);
  byId("lists").replaceChildren(...parts.flatMap(([title, items, render, number = items.length]) =>
    [make("h2", {}, `${title} (${count(number)})`), ...list(items, render)]));
}

let typing;
byId("filter").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(showHost, 80);
});
byId("host-more").addEventListener("click", () => showHost(Infinity));
byId("zoom-in").addEventListener("click", () => zoom(1.4));
byId("zoom-out").addEventListener("click", () => zoom(1 / 1.4));
byId("zoom-fit").addEventListener("click", fit);
byId("method").append(...plan.methods.map((each, i) => make("option", { value: i }, each.name)));
byId("method").addEventListener("change", (event) => showMethod(Number(event.target.value)));
new ResizeObserver(applyView).observe(graph);
if (plan.methods.length) showMethod(0);
