"use strict";
// Draws the numbers in #data. Text of prompts and tokens is only ever set as text, never read as markup.
// Letters as in the library: t, s positions; p blocks that are gone through; n heads; q stages.
const data = JSON.parse(document.getElementById("data").textContent);
const root = document.getElementById("models");
const models = [];

function make(tag, attributes = {}, ...inside) {
  const vector = ["svg", "path", "line", "circle"].includes(tag);
  const element = vector ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value);
  }
  element.append(...inside.filter((x) => x !== null));
  return element;
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// ---- words -----------------------------------------------------------------------------------------------------

const CONTROL = { " ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍" };
function visible(text) { // what cannot be seen gets a sign; letters of any script stay as they are
  return Array.from(text, (c) => {
    if (CONTROL[c]) return CONTROL[c];
    const code = c.codePointAt(0);
    if (code < 32) return String.fromCodePoint(0x2400 + code);
    if (/^[\p{Cc}\p{Cf}\p{Z}]$/u.test(c)) return "U+" + code.toString(16).toUpperCase().padStart(4, "0");
    return c;
  }).join("");
}
const hex = (bytes) => bytes.split(" ").map((b) => "‹" + b.toUpperCase() + "›").join("");
const END = "end of text";
function named(model, id) {
  const [text, bytes] = model.named[id];
  return text !== null ? visible(text) : bytes ? hex(bytes) : END;
}
function tokenName(token) {
  return token.text !== null ? visible(token.text) : token.bytes ? hex(token.bytes) : END;
}
const quoted = (token) => (token.text !== null ? `“${visible(token.text)}”` : tokenName(token));
function percent(p) {
  if (p < 0) return "−" + percent(-p);
  if (p >= 0.9995) return "100 %";
  if (p >= 0.0995) return (100 * p).toFixed(1) + " %";
  if (p >= 0.0001) return (100 * p).toPrecision(2) + " %";
  return p ? p.toExponential(0) : "0";
}
const number = (x) => (x >= 1000 ? Math.round(x).toLocaleString("en") : x >= 100 ? x.toFixed(0) : x.toPrecision(3));
const whole = (x) => x.toLocaleString("en");

// ---- the numbers of one model ------------------------------------------------------------------------------------

const triangle = (t) => (t * (t + 1)) / 2;
async function opened(raw) {
  const [attention, embedding, added] = await Promise.all(
    [raw.attention, raw.embedding.bytes, raw.places.added && raw.places.added.bytes].map((x) => x && unpacked(x)));
  const T = raw.tokens.length, P = raw.blocks.length, half = P * raw.heads * triangle(T);
  const weight = (p, n, t, s) => { // how much of what stands at s position t takes, in head n of block p
    if (s > t) return 0;
    const i = (p * raw.heads + n) * triangle(T) + triangle(t) + s;
    const size = raw.bits === 16 ? (attention[i] * 256 + attention[half + i]) / 65535 : (attention[i] / 255) ** 2;
    return raw.signed && attention[(raw.bits / 8) * half + i] ? -size : size;
  };
  const vectors = [embedding, added].map((x) => x && ((t) => x.subarray(t * raw.width, (t + 1) * raw.width)));
  return { ...raw, T, P, Q: P + 1, weight, vectors, position: 0, pinned: [P - 1, 0], shown: [P - 1, 0], redraw: [] };
}

function strongest(model, p, n, t, read = false) { // positions that t takes most from; or that take most from t
  const found = [];
  for (let s = read ? t : 0; s < (read ? model.T : t + 1); s++) found.push([s, read ? model.weight(p, n, s, t) : model.weight(p, n, t, s)]);
  return found.sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
}

// ---- drawing -----------------------------------------------------------------------------------------------------

function colour(name) {
  const value = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return value.split(/\s+/).map(Number);
}
function paintMap(canvas, model, p, n, most) { // a row for each position, a column for each it may take from
  const step = Math.ceil(model.T / most), size = Math.ceil(model.T / step), above = colour("--from"), below = colour("--to");
  canvas.width = canvas.height = size;
  const image = new ImageData(size, size);
  for (let t = 0; t < model.T; t++) for (let s = 0; s <= t; s++) {
    const i = 4 * (Math.floor(t / step) * size + Math.floor(s / step)), w = model.weight(p, n, t, s), alpha = 255 * Math.sqrt(Math.abs(w));
    if (alpha >= image.data[i + 3]) image.data.set([...(w < 0 ? below : above), alpha], i); // of several, the largest
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}
function paintVector(canvas, bytes) { // a square for each number: above zero in one colour, below in the other
  const columns = Math.max(8, 2 ** Math.round(Math.log2(Math.sqrt(bytes.length * 2)))), rows = Math.ceil(bytes.length / columns);
  const [above, below] = [colour("--from"), colour("--to")];
  Object.assign(canvas, { width: columns, height: rows });
  const image = new ImageData(columns, rows);
  bytes.forEach((v, i) => image.data.set([...(v >= 128 ? above : below), Math.min(255, 3 * Math.abs(v - 128))], 4 * i));
  canvas.getContext("2d").putImageData(image, 0, 0);
}
function bar(label, value, largest) {
  return make("div", { class: "bar" }, make("span", {}, label), make("span", { class: "track" }, make("i", { style: `width:${(100 * value) / largest}%` })), make("span", {}, number(value)));
}
function said(model, rows, largest = 1) { // [word, share, is it the true one]
  return make("ul", { class: "said" }, ...rows.map(([word, p, hit]) =>
    make("li", { class: hit ? "true" : p < 0 ? "minus" : null }, make("bdi", { class: "word", title: word }, word),
      make("span", { class: "track" }, make("i", { style: `width:${Math.min(100, (100 * Math.abs(p)) / largest)}%` })), make("span", { class: "percent" }, percent(p)))));
}
function answers(model, q, t, count) {
  const next = model.rank[q][t] ? model.tokens[t + 1].id : null;
  const rows = model.ids[q][t].slice(0, count).map((id, k) => [named(model, id), model.likely[q][t][k], id === next]);
  if (next !== null && !rows.some((row) => row[2])) rows.push([named(model, next), model.next[q][t], true]);
  return said(model, rows);
}
const terms = (...pairs) => make("dl", {}, ...pairs.flatMap(([a, b]) => [make("dt", {}, a), make("dd", {}, make("bdi", {}, b))]));
const box = (title, small, kind, ...inside) => make("section", { class: `box ${kind}`, "aria-label": title }, make("h3", {}, title, make("small", {}, small)), ...inside);
function filled(model, fill) { // an element that is filled again for every position
  const element = make("div");
  model.redraw.push(() => element.replaceChildren(...fill(model.position)));
  return element;
}

// ---- the boxes ---------------------------------------------------------------------------------------------------

function tokenBox(model) {
  return box("Token", `1 of ${whole(model.vocabulary)}`, "narrow", filled(model, (t) => {
    const token = model.tokens[t];
    return [make("p", { class: "big" }, make("bdi", {}, tokenName(token))),
      token.of ? make("p", { class: "quiet" }, "a part of ", make("bdi", {}, `“${visible(token.of)}”`)) : null,
      terms(["position", String(t)], ["id", whole(token.id)], ["bytes", token.bytes ? token.bytes.toUpperCase() : "none"], ["in the text", token.bytes ? `${token.start}–${token.end}` : "start"])].filter(Boolean);
  }));
}

function picture(model, which, t, label) {
  const canvas = make("canvas", { class: "vector", role: "img", "aria-label": label });
  paintVector(canvas, model.vectors[which](t));
  return canvas;
}
const POSITIONS = {
  learned: "a learned vector for this position is added", sinusoidal: "sines and cosines of this position are added", rotary: "queries and keys are turned: each pair of numbers by an angle of its own, times the position",
  alibi: "each score falls with the distance, in each head at a speed of its own", relative: "a learned number for the distance is added to each score", none: "nothing: the causal mask alone tells positions apart",
};
function dials(model, t) {
  const speeds = model.places.speeds.slice(0, 24);
  return make("div", { class: "dials", role: "img", "aria-label": `the angles of ${speeds.length} pairs at position ${t}` }, ...speeds.map((speed) => {
    const angle = speed * t, x = 12 + 9 * Math.cos(angle), y = 12 - 9 * Math.sin(angle);
    return make("svg", { viewBox: "0 0 24 24" }, make("circle", { cx: 12, cy: 12, r: 10 }), make("line", { x1: 12, y1: 12, x2: x.toFixed(2), y2: y.toFixed(2) }));
  }));
}
function curves(model, t, lines, label) { // what is added to the scores, by distance from here
  const all = lines.flat(), low = Math.min(...all, 0), high = Math.max(...all, 0), height = high - low || 1;
  const paths = lines.map((line) => "M" + line.map((y, d) => `${((100 * d) / Math.max(1, t)).toFixed(2)} ${(50 - (48 * (y - low)) / height).toFixed(2)}`).join("L"));
  return make("svg", { viewBox: "-1 0 102 52", class: "slopes", role: "img", "aria-label": label }, ...paths.map((d) => make("path", { d })));
}
function placeOf(model, t) {
  const { places } = model, kind = places.kind;
  const some = places.without.length ? `; blocks ${places.without.map((i) => i + 1).join(", ")} have none of it` : "";
  const parts = [make("h4", {}, `+ position (${kind})`), make("p", { class: "quiet" }, (POSITIONS[kind] || kind) + some)];
  if (places.added) parts.push(picture(model, 1, t, `the vector of position ${t}, ${model.width} numbers`));
  if (places.speeds) parts.push(dials(model, t));
  const distances = Array.from({ length: t + 1 }, (_, d) => d);
  if (places.slopes) parts.push(curves(model, t, places.slopes.map((slope) => distances.map((d) => -slope * d)), "penalty of each head by distance"));
  if (places.table) parts.push(curves(model, t, Array.from({ length: model.heads }, (_, n) => distances.map((d) => places.table[0][places.buckets[d]][n])), "what each head of block 1 adds by distance"));
  if (places.slopes || places.table) parts.push(make("p", { class: "quiet" }, `${places.table ? "block 1, " : ""}a line for each head, from distance 0 to ${t}`));
  return parts;
}
function embeddingBox(model) {
  return box("Embedding", `${whole(model.vocabulary)} × ${model.width}`, "", filled(model, (t) => [
    make("p", { class: "quiet" }, `row ${whole(model.tokens[t].id)} of the table: ${model.width} numbers`), picture(model, 0, t, `the embedding of token ${model.tokens[t].id}, ${model.width} numbers`),
    ...placeOf(model, t), make("h4", {}, "the stream begins"), bar("length", model.norms_of.stream[0][t], model.largest),
    make("h4", {}, "without any block it would say"), answers(model, 0, t, 3)]));
}

function headButton(model, p, n) {
  const canvas = make("canvas", { "aria-hidden": "true" });
  const show = () => choose(model, [p, n], false);
  const button = make("button", { type: "button", "--row": 0, "--length": model.T, onmouseenter: show, onfocus: show, onmouseleave: () => choose(model, model.pinned, false), onblur: () => choose(model, model.pinned, false), onclick: () => choose(model, [p, n], true) }, canvas, make("i"));
  model.repaint.push(() => paintMap(canvas, model, p, n, 96));
  model.redraw.push((t) => {
    const [s, w] = strongest(model, p, n, t)[0];
    button.setAttribute("aria-label", `${model.blocks[p].name}, head ${n + 1}: position ${t} takes ${percent(w)} from position ${s}, ${quoted(model.tokens[s])}`);
  });
  button.title = `${model.blocks[p].name}, head ${n + 1}`;
  model.buttons.push([p, n, button]);
  return button;
}
function blockBox(model, p) {
  const { name, span } = model.blocks[p], columns = model.heads <= 4 ? Math.max(2, model.heads) : model.heads <= 9 ? 3 : 4;
  const heads = make("div", { class: "heads", "--columns": columns }, ...Array.from({ length: model.heads }, (_, n) => headButton(model, p, n)));
  return box(name, span || "", "", make("h4", {}, model.heads === 1 ? "attention: who reads whom" : `attention: ${model.heads} heads`), heads, filled(model, (t) => [
    make("h4", {}, "length of what each adds"), bar("attention", model.norms_of.attention[p][t], model.largest), bar("MLP", model.norms_of.mlp[p][t], model.largest), bar("stream", model.norms_of.stream[p + 1][t], model.largest),
    make("h4", {}, p + 1 === model.P ? "and so it says" : "if it stopped here, it would say"), answers(model, p + 1, t, 4)]));
}

function finalBox(model) {
  const norm = model.final_norm ? model.norm : "none";
  return box("Final norm", norm, "narrow", filled(model, (t) => [
    make("h4", {}, "length"), terms(["before", number(model.norms_of.stream[model.P][t])], ["after", number(model.norms_of.final[t])]),
    make("h4", {}, "projection"), make("p", {}, `${model.width} numbers × ${whole(model.vocabulary)} rows: a score for every token`),
    make("p", { class: "quiet" }, (model.tied ? "the embedding table again" : "a table of its own") + (model.cap ? `; scores held below ${model.cap}` : "")),
    make("h4", {}, "softmax"), make("p", { class: "quiet" }, "scores become shares that sum to one")]));
}
function distributionBox(model) {
  const q = model.P;
  return box("What comes next", `${whole(model.vocabulary)} tokens`, "wide", filled(model, (t) => {
    const rank = model.rank[q][t], p = model.next[q][t], figure = (value, what) => make("div", {}, make("b", {}, value), make("span", {}, what));
    const rest = 1 - model.likely[q][t].reduce((a, b) => a + b, 0), shown = model.likely[q][t].length;
    return [rank ? make("p", {}, "After ", make("bdi", {}, quoted(model.tokens[t])), " truly comes ", make("bdi", {}, quoted(model.tokens[t + 1])), ".")
        : make("p", {}, "The prompt ends here: what comes next is open."),
      make("div", { class: "numbers" }, ...(rank ? [figure(percent(p), "its probability"), figure(whole(rank), `its rank of ${whole(model.vocabulary)}`), figure(p ? (-Math.log2(p)).toFixed(2) + " bits" : "∞", "surprise")] : []), figure(model.entropy[q][t].toFixed(2) + " bits", "entropy")),
      answers(model, q, t, shown), rest > 0.00005 ? make("p", { class: "quiet" }, `all ${whole(model.vocabulary - shown)} others: ${percent(rest)}`) : null].filter(Boolean);
  }));
}

// ---- one head, large; and every stage at once ---------------------------------------------------------------------

function detail(model) {
  const canvas = make("canvas", { role: "img" }), title = make("h3"), marks = [make("i", { class: "across" }), make("i", { class: "down" })];
  const map = make("div", { class: "map", "--row": 0, "--length": model.T, onclick: (event) => move(model, Math.floor((event.offsetY / canvas.clientHeight) * model.T)) }, canvas, ...marks);
  const pairs = make("div", { class: "pairs", "aria-live": "off" });
  model.drawHead = () => {
    const [p, n] = model.shown, t = model.position;
    title.textContent = `${model.blocks[p].name}, head ${n + 1}: who attends to whom`;
    canvas.setAttribute("aria-label", `${title.textContent}; a row for each position, a column for each that it takes from`);
    paintMap(canvas, model, p, n, 512);
    const list = (read) => said(model, strongest(model, p, n, t, read).filter((x) => Math.abs(x[1]) > 0.0005).slice(0, 8).map(([s, w]) => [`${s} ${tokenName(model.tokens[s])}`, w, false]));
    pairs.replaceChildren(make("div", { "--hue": "var(--from)" }, make("h4", {}, `position ${t} takes from`), list(false)), make("div", { "--hue": "var(--to)" }, make("h4", {}, `position ${t} is taken from by`), list(true)));
    model.chips.forEach((chip, s) => {
      const w = s <= t ? model.weight(p, n, t, s) : model.weight(p, n, s, t);
      chip.style.setProperty("--share", (0.9 * Math.abs(w) ** 0.7).toFixed(3));
      chip.classList.toggle("minus", w < 0);
      chip.style.setProperty("--hue", s <= t ? "var(--from)" : "var(--to)");
    });
    for (const [bp, bn, button] of model.buttons) button.setAttribute("aria-pressed", String(bp === model.pinned[0] && bn === model.pinned[1]));
  };
  model.repaint.push(() => model.drawHead());
  return make("div", { class: "below" }, make("div", {}, title, map, make("p", { class: "quiet" }, model.bits === 16 ? "rows: the position that reads; columns: what it reads; drawn by the square root of the weight" : "a long prompt: weights are kept to 0.004, small maps show the largest of several positions"), model.signed ? make("p", { class: "quiet" }, "in the other colour, and striped in the prompt and in lists: what is taken away. The head is scaled afterwards, so a row is drawn as shares whose sizes sum to 100 %") : ""), make("div", {}, make("h3", {}, "In numbers"), pairs, lens(model)));
}

function lens(model) {
  const table = make("table"), near = 12;
  model.redraw.push((t) => {
    const first = Math.max(0, Math.min(t - (near >> 1), model.T - near)), places = Array.from({ length: Math.min(near, model.T) }, (_, i) => first + i);
    const head = make("tr", {}, make("th", { scope: "col" }, "after"), ...places.map((s) => make("th", { scope: "col", class: s === t ? "chosen" : null }, make("bdi", {}, tokenName(model.tokens[s])))));
    const rows = Array.from({ length: model.Q }, (_, i) => model.P - i).map((q) => make("tr", {}, make("th", { scope: "row" }, q ? model.blocks[q - 1].name : "embedding"),
      ...places.map((s) => make("td", { class: `${s === t ? "chosen" : ""} ${model.rank[q][s] === 1 ? "true" : ""}`, "--p": model.likely[q][s][0], title: percent(model.likely[q][s][0]), onclick: () => move(model, s) }, make("bdi", {}, named(model, model.ids[q][s][0]))))));
    table.replaceChildren(make("caption", {}, "What it would say after each block (the logit lens: the stream there through the final norm and the projection). Darker: surer; underlined: true."), make("thead", {}, head), make("tbody", {}, ...rows));
  });
  return make("div", { class: "lens" }, table);
}

// ---- choosing ----------------------------------------------------------------------------------------------------

function choose(model, head, keep) { // a head of one model; where all have it, of all
  for (const other of models) {
    const here = [Math.min(head[0], other.P - 1), Math.min(head[1], other.heads - 1)];
    if (other !== model && (here[0] !== head[0] || here[1] !== head[1])) continue;
    if (keep) other.pinned = here;
    other.shown = here;
    other.drawHead();
  }
}
function move(model, t) { // to a position; other models go to the one that ends with the same byte
  t = Math.max(0, Math.min(model.T - 1, t));
  const last = model.tokens[t].end;
  for (const other of models) {
    other.position = other === model ? t : last ? other.tokens.findIndex((token) => token.end >= last) : 0;
    other.chips.forEach((chip, s) => { chip.setAttribute("aria-checked", String(s === other.position)); chip.tabIndex = s === other.position ? 0 : -1; });
    for (const map of other.element.querySelectorAll(".heads button, .map")) map.style.setProperty("--row", other.position / other.T);
    for (const draw of other.redraw) draw(other.position);
    other.drawHead();
    other.chips[other.position].scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  const q = model.P, rank = model.rank[q][t];
  document.getElementById("spoken").textContent = `Position ${t} of ${model.T}, ${quoted(model.tokens[t])}. Likeliest next: ${named(model, model.ids[q][t][0])}, ${percent(model.likely[q][t][0])}.` + (rank ? ` Truly next: ${quoted(model.tokens[t + 1])}, ${percent(model.next[q][t])}, rank ${rank}.` : " The prompt ends here.");
}
function keys(event) {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const model = models.find((one) => one.element.contains(document.activeElement)) || models[0];
  const to = { ArrowLeft: model.position - 1, ArrowRight: model.position + 1, Home: 0, End: model.T - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  const chip = model.chips.includes(document.activeElement);
  move(model, to);
  if (chip) model.chips[model.position].focus();
}

function built(model) {
  Object.assign(model, { buttons: [], repaint: [], largest: Math.max(...[model.norms_of.attention, model.norms_of.mlp, model.norms_of.stream].flat(2)) });
  model.chips = model.tokens.map((token, t) => make("button", { type: "button", role: "radio", class: token.text !== null ? null : token.bytes ? "part" : "special", title: `position ${t}, id ${token.id}, bytes ${token.bytes || "none"}`, "aria-label": `position ${t}: ${token.of ? "a byte of " + visible(token.of) : tokenName(token)}`, onclick: () => move(model, t) }, make("bdi", {}, token.text === null && token.bytes ? token.bytes.toUpperCase() : token.bytes ? tokenName(token) : "⊢")));
  const summary = [`step ${whole(model.step)}`, `${model.depth} block${model.depth > 1 ? "s" : ""}${model.P > model.depth ? ` × ${model.P / model.depth}` : ""}`, `${model.heads} head${model.heads > 1 ? "s" : ""}`, `width ${model.width}`, `context ${whole(model.context)}`, `${whole(model.parameters)} parameters`, `${model.T} tokens here`];
  const chain = make("div", { class: "chain", role: "group", "aria-label": "the chain, from token to distribution", tabindex: 0 }, tokenBox(model), embeddingBox(model), ...model.blocks.map((_, p) => blockBox(model, p)), finalBox(model), distributionBox(model));
  model.element = make("article", { class: "model" }, make("h2", {}, make("bdi", {}, model.name)), make("p", { class: "soft" }, summary.join(" · ")),
    make("div", { class: "strip", role: "radiogroup", "aria-label": "positions of the prompt" }, ...model.chips),
    make("p", { class: "key" }, make("span", {}, make("i", { "--hue": "var(--from)" }), "the chosen position takes from these"), make("span", {}, make("i", { "--hue": "var(--to)" }), "these take from it"), make("span", {}, "in the head shown below")), chain, detail(model));
  root.append(model.element);
}

async function start() {
  for (const raw of data.models) models.push(await opened(raw));
  if (models.length > 1) root.className = "two";
  models.forEach(built);
  move(models[0], data.position);
  const paint = () => models.forEach((model) => model.repaint.forEach((draw) => draw()));
  paint();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { paint(); models.forEach((model) => model.redraw.forEach((draw) => draw(model.position))); });
  document.addEventListener("keydown", keys);
  scrollTo(0, 0);
  document.documentElement.dataset.ready = "yes";
}
start();
