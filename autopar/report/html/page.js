"use strict";
// The page can be read without this script. It shows shards and the text under the pointer, sorts, filters and unfolds.

const SVG = "http://www.w3.org/2000/svg";
const known = JSON.parse(document.getElementById("known").textContent);
const shown = document.getElementById("shown");

function make(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function line(text, name) {
  const element = document.createElement("div");
  element.textContent = text;
  if (name) element.className = name;
  return element;
}

// Shows the panel next to the element that it describes, inside the window.
function show(about, ...children) {
  shown.replaceChildren(...children);
  shown.hidden = false;
  const at = about.getBoundingClientRect(), own = shown.getBoundingClientRect();
  const width = document.documentElement.clientWidth;
  const left = Math.max(6, Math.min(at.left, width - own.width - 6));
  const below = at.bottom + 8, above = at.top - own.height - 8;
  const top = below + own.height > window.innerHeight && above > 0 ? above : below;
  shown.style.left = `${left + window.scrollX}px`;
  shown.style.top = `${top + window.scrollY}px`;
}

function hide() {
  shown.hidden = true;
}

// -- shards ---------------------------------------------------------------------------------

const names = (text) => (text ? text.split(",") : []);

function meshOf(element) {
  return known[element.closest("[data-mesh]").dataset.mesh];
}

// For each device in mesh order, the last axis fastest: the number of its part of every dim.
function devicesOf(mesh, spec) {
  const count = mesh.sizes.reduce((a, b) => a * b, 1);
  return Array.from({ length: count }, (_, device) => {
    const at = {};
    let rest = device;
    for (let n = mesh.sizes.length - 1; n >= 0; n--) {
      at[mesh.axes[n]] = rest % mesh.sizes[n];
      rest = Math.floor(rest / mesh.sizes[n]);
    }
    return spec.map((axes) => axes.reduce((part, axis) => part * mesh.sizes[mesh.axes.indexOf(axis)] + at[axis], 0));
  });
}

// [0, 1, 2, 5] as "0-2, 5".
function runs(numbers) {
  const found = [];
  for (const n of numbers) {
    const last = found[found.length - 1];
    if (last && n === last[1] + 1) last[1] = n;
    else found.push([n, n]);
  }
  return found.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(", ");
}

function shardsOf(element) {
  const mesh = meshOf(element);
  const shape = names(element.dataset.shape).map(Number);
  const spec = shape.length ? element.dataset.spec.split("|").map(names) : [];
  const parts = spec.map((axes) => axes.reduce((n, axis) => n * mesh.sizes[mesh.axes.indexOf(axis)], 1));
  return { mesh, shape, spec, parts, devices: devicesOf(mesh, spec) };
}

// The two dims to draw: sharded dims first, then the last ones.
function drawnDims({ shape, parts }) {
  const order = shape.map((_, dim) => dim).sort((a, b) => (parts[b] > 1) - (parts[a] > 1) || b - a);
  return order.slice(0, 2).sort((a, b) => a - b);
}

const axisColour = (mesh, axis) => `var(--axis${mesh.axes.indexOf(axis) % 6})`;

// One matrix: its parts by row and column with their devices; to the left and above, the mesh axes that shard it.
function panel(shards, dims, fixed, width, height) {
  const { mesh, spec, parts, devices } = shards;
  const [r, c] = dims.length === 2 ? dims : [undefined, dims[0]];
  const rows = r === undefined ? 1 : parts[r], columns = c === undefined ? 1 : parts[c];
  const edge = 9, w = (width - edge) / columns, h = (height - edge) / rows;
  const drawn = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  const rulers = [[r, rows, (n) => ({ x: 0, y: edge + n * h, width: edge - 3, height: h })], [c, columns, (n) => ({ x: edge + n * w, y: 0, width: w, height: edge - 3 })]];
  for (const [dim, count, place] of rulers) {
    if (dim === undefined || count < 2) continue;
    for (let n = 0; n < count; n++) {
      let rest = n, size = count;
      spec[dim].forEach((axis, k) => {
        const own = mesh.sizes[mesh.axes.indexOf(axis)];
        size /= own;
        const index = Math.floor(rest / size);
        rest %= size;
        const at = place(n), share = spec[dim].length;
        const thin = at.width > at.height || dim === c ? { y: at.y + (k * at.height) / share, height: at.height / share } : { x: at.x + (k * at.width) / share, width: at.width / share };
        drawn.append(make("rect", { ...at, ...thin, style: `fill:${axisColour(mesh, axis)};fill-opacity:${0.45 + (0.55 * (index + 1)) / own}` }));
      });
    }
  }
  const mine = devices.map((own, device) => [own, mesh.first + device]).filter(([own]) => Object.entries(fixed).every(([dim, part]) => own[dim] === part));
  for (let i = 0; i < rows; i++) {
    for (let j = 0; j < columns; j++) {
      const have = mine.filter(([own]) => (r === undefined || own[r] === i) && (c === undefined || own[c] === j)).map(([, device]) => device);
      const x = edge + j * w, y = edge + i * h;
      drawn.append(make("rect", { class: "shard", x, y, width: w, height: h, "data-devices": have.join(","), style: `fill:var(--${(i + j) % 2 ? "panel" : "whole"})` }));
      const text = runs(have);
      if (h >= 11 && w >= 6 * text.length) drawn.append(make("text", { x: x + w / 2, y: y + h / 2 }, text));
    }
  }
  return drawn;
}

function showShards(element) {
  const shards = shardsOf(element);
  const { mesh, shape, spec, parts } = shards;
  const dims = drawnDims(shards);
  const also = shape.map((_, dim) => dim).filter((dim) => parts[dim] > 1 && !dims.includes(dim));
  const local = shape.map((size, dim) => Math.ceil(size / parts[dim]));
  const cut = spec.map((axes, dim) => (axes.length ? `dim ${dim} over ${axes.join(", ")} into ${parts[dim]} parts` : "")).filter(Boolean);
  const children = [line(element.getAttribute("aria-label"), "panel-name")];
  children.push(line(shape.length ? `${cut.join("; ") || "whole on every device"}; each device has ${local.join(" x ")}` : "whole on every device"));
  if (element.dataset.pending) children.push(line(`each device has a term of a sum over ${names(element.dataset.pending).join(", ")}`));
  const tall = dims.length === 2 ? Math.max(70, Math.min(190, Math.max(parts[dims[0]] * 16, 110))) : 46;
  const wide = Math.min(440, Math.max(230, Math.max(1, ...dims.map((dim) => parts[dim])) * 34));
  const panels = also.length ? Math.min(4, parts[also[0]]) : 1;
  for (let n = 0; n < panels; n++) {
    const fixed = Object.fromEntries(also.map((dim, k) => [dim, k ? 0 : n]));
    if (also.length) children.push(line(also.map((dim) => `part ${fixed[dim]} of dim ${dim}`).join(", ")));
    children.push(panel(shards, dims, fixed, wide, also.length ? Math.max(46, tall / 2) : tall));
  }
  if (also.length && panels < parts[also[0]]) children.push(line(`and ${parts[also[0]] - panels} more parts of dim ${also[0]}`));
  if (dims.length) children.push(line(`drawn: ${dims.map((dim, n) => `dim ${dim} ${dims.length === 2 && !n ? "down" : "across"}`).join(", ")}; in each part its devices`));
  show(element, ...children);
}

// -- rows over time -------------------------------------------------------------------------

function seconds(ns) {
  for (const [unit, size] of [["s", 1e9], ["ms", 1e6], ["us", 1e3]]) if (ns >= size) return `${(ns / size).toPrecision(3)} ${unit}`;
  return `${ns} ns`;
}

function showSlice(track, n) {
  const row = known[track.dataset.track];
  const [start, ns, text] = row.at[n];
  let cursor = track.querySelector(".track-cursor");
  if (!cursor) track.append((cursor = line("", "track-cursor")));
  cursor.style.left = `${(100 * start) / row.whole}%`;
  cursor.style.width = `${(100 * ns) / row.whole}%`;
  track.dataset.at = n;
  show(cursor, line(row.texts[text], "panel-name"), line(`${seconds(start)} to ${seconds(start + ns)}: ${seconds(ns)}`));
}

function leaveTrack(track) {
  track.querySelector(".track-cursor")?.remove();
  hide();
}

function sliceAt(track, event) {
  const row = known[track.dataset.track], box = track.getBoundingClientRect();
  const at = ((event.clientX - box.left) / box.width) * row.whole, near = (3 / box.width) * row.whole;
  let best = -1, least = near;
  row.at.forEach(([start, ns], n) => {
    const off = Math.max(start - at, at - start - ns, 0);
    if (off < least || (off === 0 && best < 0)) [best, least] = [n, off];
  });
  return best;
}

for (const track of document.querySelectorAll("[data-track]")) {
  track.addEventListener("pointermove", (event) => {
    const n = sliceAt(track, event);
    if (n < 0) leaveTrack(track);
    else showSlice(track, n);
  });
  track.addEventListener("pointerleave", () => leaveTrack(track));
  track.addEventListener("focus", () => showSlice(track, Number(track.dataset.at || 0)));
  track.addEventListener("blur", () => leaveTrack(track));
  track.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const last = known[track.dataset.track].at.length - 1;
    showSlice(track, Math.max(0, Math.min(last, Number(track.dataset.at || 0) + step)));
  });
}

// -- pointing, with the pointer or the keyboard ----------------------------------------------

const blocksOf = (event) => event.target instanceof Element && event.target.closest(".blocks");
for (const kind of ["pointerover", "focusin"]) document.addEventListener(kind, (event) => blocksOf(event) && showShards(blocksOf(event)));
for (const kind of ["pointerout", "focusout"]) document.addEventListener(kind, (event) => blocksOf(event) && hide());
document.addEventListener("keydown", (event) => event.key === "Escape" && hide());

// -- tables ----------------------------------------------------------------------------------

function valueOf(row, column) {
  const cell = row.cells[column];
  return cell.classList.contains("number") ? Number(cell.dataset.value ?? -Infinity) : cell.textContent;
}

for (const head of document.querySelectorAll(".sortable th button")) {
  head.addEventListener("click", () => {
    const th = head.parentElement, body = th.closest("table").tBodies[0], column = th.cellIndex;
    const number = th.classList.contains("number");
    const now = th.getAttribute("aria-sort");
    const order = now ? (now === "ascending" ? "descending" : "ascending") : number ? "descending" : "ascending";
    for (const other of th.parentElement.cells) other.removeAttribute("aria-sort");
    th.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const compare = (a, b) => (number ? a - b || 0 : a.localeCompare(b, "en", { numeric: true }));
    body.append(...[...body.rows].sort((a, b) => sign * compare(valueOf(a, column), valueOf(b, column))));
  });
}

// A long table shows its first rows, the most important ones; its headings sort all rows.
const FEW_ROWS = 15;
for (const box of document.querySelectorAll(".scroll")) {
  const rows = box.querySelectorAll(".sortable tbody tr").length;
  if (rows <= FEW_ROWS + 3) continue;
  const more = document.createElement("button");
  more.className = "more";
  more.type = "button";
  const fold = (folded) => {
    box.classList.toggle("folded", folded);
    more.textContent = folded ? `show all ${rows} rows` : `show ${FEW_ROWS} rows`;
  };
  more.addEventListener("click", () => fold(!box.classList.contains("folded")));
  fold(true);
  box.after(more);
}

for (const filter of document.querySelectorAll(".filter")) {
  filter.addEventListener("input", () => {
    const query = filter.value.toLowerCase();
    if (query && filter.parentElement.querySelector(".folded")) filter.parentElement.querySelector(".more").click();
    for (const row of filter.parentElement.querySelectorAll("tbody tr")) row.hidden = !row.textContent.toLowerCase().includes(query);
  });
}

// -- layers one by one -----------------------------------------------------------------------

// The numbers inside the braces of a pattern such as h_{0..11}.
const numbersOf = (inside) => {
  const numbers = inside.split(",").flatMap((part) => {
    const [a, b] = part.split("..").map(Number);
    return part.includes("..") && !part.startsWith("..") && b ? Array.from({ length: b - a + 1 }, (_, n) => a + n) : [a];
  });
  const gap = inside.split(",").indexOf("..");
  if (gap < 0) return numbers;
  const [first, second] = inside.split(",").map(Number), last = Number(inside.split(",").at(-1));
  return Array.from({ length: (last - first) / (second - first) + 1 }, (_, n) => first + n * (second - first));
};

// The number of texts that match a pattern if this text does, else 0.
function covers(pattern, text) {
  const sets = [...pattern.matchAll(/\{([\d,.]+)\}/g)].map((match) => numbersOf(match[1]));
  const parts = pattern.split(/\{[\d,.]+\}/).map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  const match = new RegExp(`^${parts.join("(\\d+)")}$`).exec(text);
  if (!match || !sets.every((set, n) => set.includes(Number(match[n + 1])))) return 0;
  return Math.max(1, ...sets.map((set) => set.length));
}

function oneOf(folded, member) {
  const depth = Number(folded.dataset.depth), copy = folded.cloneNode(true), count = folded.dataset.members.split(" ").length;
  copy.querySelector(".module-name").textContent = folded.dataset.front + member;
  copy.querySelector(":scope > summary .unfold").remove();
  copy.querySelector(":scope > summary .times").remove();
  for (const size of copy.querySelectorAll("[data-bytes]")) {
    size.dataset.bytes /= count;
    const bytes = Number(size.dataset.bytes);
    const power = bytes ? Math.min(4, Math.floor(Math.log10(bytes) / 3)) : 0;
    size.textContent = bytes ? `${(bytes / 1000 ** power).toPrecision(3)} ${["B", "KB", "MB", "GB", "TB"][power]} on each device` : "";
  }
  for (const row of copy.querySelectorAll("[data-place]")) {
    const parts = row.dataset.place.split("/"), many = covers(parts[depth - 1] ?? "", member);
    if (!many) {
      row.remove();
      continue;
    }
    parts[depth - 1] = member;
    row.dataset.place = parts.join("/");
    const times = row.querySelector("[data-count]");
    times.dataset.count = Math.round(times.dataset.count / many);
    times.textContent = times.dataset.count > 1 ? `x${times.dataset.count}` : "";
  }
  for (const all of [...copy.querySelectorAll(".activations")]) {
    const rows = [...all.querySelectorAll("[data-count]")];
    if (!rows.length) all.remove();
    else all.querySelector("summary span").textContent = `activations (${rows.reduce((n, row) => n + Number(row.dataset.count), 0)})`;
  }
  delete copy.dataset.members;
  copy.open = false;
  return copy;
}

document.addEventListener("click", (event) => {
  const button = event.target.closest?.(".unfold");
  if (!button) return;
  event.preventDefault();
  const folded = button.closest("details"), all = folded.nextElementSibling?.classList.contains("unfolded") && folded.nextElementSibling;
  if (all) {
    all.remove();
    button.textContent = `show all ${folded.dataset.members.split(" ").length}`;
    return;
  }
  const box = document.createElement("div");
  box.className = "unfolded";
  box.append(...folded.dataset.members.split(" ").map((member) => oneOf(folded, member)));
  folded.after(box);
  button.textContent = "fold";
});

// -- printing --------------------------------------------------------------------------------

let closed = [];
window.addEventListener("beforeprint", () => {
  hide();
  closed = [...document.querySelectorAll("details:not([open]):not(.activations)")];
  for (const one of closed) one.open = true;
});
window.addEventListener("afterprint", () => {
  for (const one of closed) one.open = false;
});
