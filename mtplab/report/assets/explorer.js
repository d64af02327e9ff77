"use strict";
// The explorer knows only the rows in #data. Every text goes in through textContent or setAttribute, never as markup.
(() => {
  const $ = (id) => document.getElementById(id);
  const { rows, provenance, policies, weights, palette, labels, first } = JSON.parse($("data").textContent);
  const isMap = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
  // what all rows share is written once, nested entries too
  const merged = (shared, own) => {
    const out = { ...shared };
    for (const [key, value] of Object.entries(own)) out[key] = isMap(value) && isMap(shared[key]) ? merged(shared[key], value) : value;
    return out;
  };
  for (const row of rows) row.provenance = merged(provenance, row.provenance);
  const SVG = "http://www.w3.org/2000/svg";
  const ALL = "\u0000all";
  // more lines than can be told apart: the first exclusion sets are ticked, the others wait for the reader
  const MANY = 6;
  const ticked = policies.length * weights.length > MANY ? weights.slice(0, first) : weights;
  const shown = { policies: new Set(policies), weights: new Set(ticked) };
  let points = [], current = -1;

  // control characters and direction marks are shown as code points: a name may hold anything
  const clean = (text) => String(text).replace(/[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g,
    (sign) => "\\u" + sign.charCodeAt(0).toString(16).padStart(4, "0"));
  const number = (value, digits = 2) => value == null || Number.isNaN(value) ? "–" : value.toFixed(digits);
  // as tables write it: two digits of the error and the number to the same place, or three digits of the number
  const place = (value, digits) => {
    const size = Math.floor(Math.log10(Math.abs(value)));
    return Math.min(9, Math.max(0, digits - 1 - size - (Math.abs(+value.toPrecision(digits)) >= 10 ** (size + 1) ? 1 : 0)));
  };
  const measured = (value, error) => {
    const digits = error ? place(error, 2) : value ? place(value, 3) : 0;
    return value.toFixed(digits) + (error ? ` ± ${error.toFixed(digits)}` : "");
  };
  const percent = (value) => value == null ? "–" : (100 * value).toFixed(1) + " %";
  function element(name, attributes = {}, text = null) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== null) made.textContent = text;
    return made;
  }

  const SHAPES = {
    circle: (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0z`,
    square: (r) => `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
    up: (r) => `M0,${-1.2 * r}L${1.15 * r},${r}H${-1.15 * r}z`,
    diamond: (r) => `M0,${-1.35 * r}L${1.35 * r},0L0,${1.35 * r}L${-1.35 * r},0z`,
    down: (r) => `M0,${1.2 * r}L${1.15 * r},${-r}H${-1.15 * r}z`,
    plus: (r) => `M${-r / 2},${-1.2 * r}h${r}v${0.7 * r}h${0.7 * r}v${r}h${-0.7 * r}v${0.7 * r}h${-r}v${-0.7 * r}h${-0.7 * r}v${-r}h${0.7 * r}z`,
    cross: (r) => `M${-r},${-r}L0,${-0.4 * r}L${r},${-r}L${0.4 * r},0L${r},${r}L0,${0.4 * r}L${-r},${r}L${-0.4 * r},0z`,
  };
  const colour = (policy) => palette.colours[policy];
  // colour says the cache, marker and dash the exclusion set, as in the figures
  const shape = (name, r) => SHAPES[palette.markers[weights.indexOf(name) % palette.markers.length]](r);
  const dash = (name) => (palette.dashes[weights.indexOf(name) % palette.dashes.length] || []).join(" ");

  function checks(id, names, set, sample) {
    for (const name of names) {
      const label = document.createElement("label"), box = document.createElement("input"), text = document.createElement("span");
      box.type = "checkbox"; box.checked = set.has(name); text.textContent = clean(name); label.title = clean(name);
      box.addEventListener("change", () => { if (box.checked) set.add(name); else set.delete(name); draw(); });
      const picture = element("svg", { viewBox: "0 0 34 12", "aria-hidden": "true" });
      sample(picture, name);
      label.append(box, picture, text);
      $(id).append(label);
    }
  }
  checks("weights", weights, shown.weights, (picture, name) => {
    picture.append(element("path", { d: "M1,6H33", stroke: "currentColor", "stroke-width": 2, "stroke-dasharray": dash(name) }),
      element("path", { d: shape(name, 4.4), fill: "currentColor", transform: "translate(17,6)" }));
  });
  checks("policies", policies, shown.policies, (picture, name) =>
    picture.append(element("path", { d: "M1,6H33", stroke: colour(name), "stroke-width": 4 })));
  function options(id, entries) {
    for (const [value, text] of entries) $(id).append(new Option(text, value));
    $(id).addEventListener("change", draw);
    if (entries.length < 2) $(id).parentElement.hidden = true;
  }
  const unique = (list) => [...new Set(list)];
  options("temperature", unique(rows.map((row) => row.temperature)).sort((a, b) => a - b)
    .map((value) => [value, value === 0 ? "0 (greedy)" : String(value)]));
  const domains = unique(rows.flatMap((row) => Object.keys(row.by_domain || {})));
  options("domain", [[ALL, "all prompts"], ...(domains.length > 1 ? domains.map((name) => [name, clean(name)]) : [])]);
  // rows of traces have no speed: every depth comes from one decoding
  if (!rows.some((row) => row.tokens_per_second != null)) $("view").querySelector('[value="speed"]').remove();
  $("view").addEventListener("change", draw);
  const depths = unique(rows.map((row) => row.depth)).sort((a, b) => a - b);
  Object.assign($("depth"), { min: 0, max: Math.max(0, depths.length - 1), value: Math.max(0, depths.length - 1) });
  $("depth").addEventListener("input", draw);

  // a row as the chosen domain has it
  function inDomain(row) {
    const domain = $("domain").value;
    if (domain === ALL) return row;
    const part = (row.by_domain || {})[domain];
    if (!part) return null;
    const shares = part.per_position || [];
    return { ...row, ...part, conditional: part.conditional || shares.map((share, j) => j === 0 ? share : shares[j - 1] > 0 ? share / shares[j - 1] : null),
      tokens_per_second: null, odd_timing: null, length_error: (row.domain_errors || {})[domain] ?? null };
  }
  const visible = () => rows.filter((row) => row.error == null && String(row.temperature) === $("temperature").value
    && shown.policies.has(row.policy_label) && shown.weights.has(row.weights_label))
    .map(inDomain).filter((row) => row && row.acceptance_length != null);
  const chosenDepth = () => depths[+$("depth").value];

  // views whose points are depths: what a row's value is, and what it is called
  const BY_DEPTH = {
    depth: { value: (row) => row.acceptance_length, axis: "Acceptance length (tokens per round)", least: 1, most: 1.5,
      unit: "tokens per round", digits: 2, best: "most" },
    speed: { value: (row) => row.tokens_per_second, axis: "Tokens per second, all prompts at once", least: 0, most: 1,
      unit: "tokens per second", digits: 0, best: "fastest" },
  };
  const plusMinus = (row) => number(row.acceptance_length) + (row.length_error ? ` ± ${number(row.length_error)}` : "");
  // rounds over which the share of draft j was taken: of the conditional one, those that accepted all before
  const reached = (row, view, j) => view === "conditional" && j > 1 ? Math.round(row.rounds * (row.per_position[j - 2] || 0)) : row.rounds;
  const FEW = 50;
  const few = (view, point) => view === "conditional" && reached(point.row, view, point.x) < FEW;
  // hollow: not to be believed, for want of rounds, for a busy machine, or because the target is broken
  const doubtful = (view, point) => point.row.target_fault != null || (view === "speed" ? point.row.odd_timing != null : few(view, point));

  function seriesOf(list, view, depth) {
    const groups = new Map();
    for (const row of list) {
      if (!groups.has(row.series)) groups.set(row.series, { name: row.series, policy: row.policy_label, weights: row.weights_label, points: [] });
      const group = groups.get(row.series);
      if (BY_DEPTH[view]) {
        const y = BY_DEPTH[view].value(row);
        if (y != null) group.points.push({ x: row.depth, y, row });
      } else if (row.depth === depth) (row[view] || []).forEach((share, j) => share != null && group.points.push({ x: j + 1, y: 100 * share, row }));
    }
    for (const group of groups.values()) group.points.sort((a, b) => a.x - b.x);
    return [...groups.values()].filter((group) => group.points.length);
  }

  function ticks(low, high, wanted) {
    const raw = (high - low) / wanted, base = 10 ** Math.floor(Math.log10(raw || 1));
    const step = [1, 2, 2.5, 5, 10].map((factor) => factor * base).find((candidate) => candidate >= raw);
    const out = [];
    for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + 1e-9; value += step) out.push(+value.toFixed(6));
    return out;
  }

  function draw() {
    const view = $("view").value, depth = chosenDepth(), list = visible(), series = seriesOf(list, view, depth);
    $("depth-value").textContent = depth ?? "";
    $("depth").setAttribute("aria-valuetext", `depth ${depth}`);
    // only what is seen is made: a table of hundreds of rows takes longer than a chart
    if (!$("table").hidden) { summary(list, depth); fillTable(list); return; }
    const chart = $("chart"), box = $("stage").getBoundingClientRect();
    const width = Math.max(260, box.width), height = Math.max(160, box.height);
    chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
    chart.replaceChildren();
    points = []; select(-1);
    const byDepth = BY_DEPTH[view], xs = byDepth ? depths : series.flatMap((group) => group.points.map((point) => point.x));
    const ys = series.flatMap((group) => group.points.map((point) => point.y));
    const lowX = Math.min(...xs, 1), highX = Math.max(...xs, lowX + 1);
    const lowY = byDepth ? Math.min(byDepth.least, ...ys) : 0, highY = byDepth ? Math.max(byDepth.most, ...ys) : 100;
    // all with as many digits as the finest of them needs
    const marks = ticks(lowY, highY, 7), fine = Math.max(0, ...marks.map((value) => (String(value).split(".")[1] || "").length));
    const longest = Math.max(...marks.map((value) => value.toFixed(fine).length));
    const edge = { left: 36 + 8 * longest, right: 14, top: 10, bottom: 44 };
    const pad = (highX - lowX) * 0.04;
    const x = (value) => edge.left + (value - lowX + pad) / (highX - lowX + 2 * pad) * (width - edge.left - edge.right);
    const y = (value) => height - edge.bottom - (value - lowY) / (highY * 1.03 - lowY) * (height - edge.top - edge.bottom);
    for (const value of marks) {
      chart.append(element("line", { class: "grid", x1: edge.left, x2: width - edge.right, y1: y(value), y2: y(value) }),
        element("text", { x: edge.left - 8, y: y(value) + 4, "text-anchor": "end" }, value.toFixed(fine)));
    }
    for (let value = lowX; value <= highX; value += Math.ceil((highX - lowX) / 16)) {
      chart.append(element("text", { x: x(value), y: height - edge.bottom + 18, "text-anchor": "middle" }, String(value)));
    }
    const middle = edge.top + (height - edge.top - edge.bottom) / 2;
    chart.append(element("text", { class: "soft", x: (edge.left + width - edge.right) / 2, y: height - 8, "text-anchor": "middle" },
      byDepth ? "Draft depth k (draft tokens per round)" : `Draft position j in the round (depth ${depth})`),
      element("text", { class: "soft", transform: `translate(15,${middle}) rotate(-90)`, "text-anchor": "middle" },
        byDepth ? byDepth.axis : "Share of rounds (%)"));
    if (byDepth) chart.append(element("line", { class: "chosen", x1: x(depth), x2: x(depth), y1: edge.top, y2: height - edge.bottom }));
    // equal points are set side by side, or the last line drawn would hide the others
    const spread = Math.min(5, 26 / Math.max(1, series.length));
    const dots = document.createDocumentFragment();
    series.forEach((group, index) => {
      // plain decoding is one token a round in every setting: there the lines meet
      const shift = (point) => view === "depth" && point.x === 0 ? 0 : (index - (series.length - 1) / 2) * spread;
      const path = group.points.map((point, i) => `${i ? "L" : "M"}${x(point.x) + shift(point)},${y(point.y)}`).join("");
      chart.append(element("path", { class: "series", d: path, stroke: colour(group.policy), "stroke-dasharray": dash(group.weights) }));
      for (const point of group.points) {
        const look = doubtful(view, point) ? { class: "dot doubtful", style: `stroke:${colour(group.policy)}` } : { class: "dot", fill: colour(group.policy) };
        const px = x(point.x) + shift(point), py = y(point.y);
        const dot = element("path", { ...look, d: shape(group.weights, 4.6), transform: `translate(${px},${py})` });
        const at = points.push({ ...point, group, index, dot, px, py }) - 1;
        dot.addEventListener("pointerenter", () => select(at));
        dots.append(dot);
      }
    });
    chart.append(dots);
    if (!series.length) chart.append(element("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "No rows for this choice."));
    summary(list, depth);
  }

  function summary(list, depth) {
    const view = $("view").value, shares = { value: (row) => (row.per_position || [])[0], unit: "of rounds with draft 1 accepted", best: "most" };
    const { value, unit, digits, best } = BY_DEPTH[view] || shares;
    const told = (row) => BY_DEPTH[view] ? number(value(row), digits) : percent(value(row));
    const here = list.filter((row) => row.depth === depth && value(row) != null && row.target_fault == null && !(view === "speed" && row.odd_timing != null))
      .sort((a, b) => value(b) - value(a));
    const failed = rows.filter((row) => row.error != null).length;
    const odd = view === "speed" ? list.filter((row) => row.odd_timing != null).length : 0;
    const hidden = weights.length - shown.weights.size + policies.length - shown.policies.size;
    $("summary").textContent = (here.length
      ? `At depth ${depth}, ${here.length} setting${here.length > 1 ? "s" : ""}: from ${told(here[here.length - 1])} to ${told(here[0])} ${unit}; ${best} with ${clean(here[0].series)}.`
      : `No rows at depth ${depth} for this choice.`)
      + (odd ? ` ${odd} hollow points: rounds more than 3 times off the others' trend, the machine was busy.` : "")
      + warning(list)
      + (failed ? ` ${failed} rows failed and are left out.` : "") + (hidden ? " Tick more above to add lines." : "");
  }

  // what is drawn of a target that is broken is how easily it is guessed, nothing else
  function warning(list) {
    const broken = unique(list.filter((row) => row.target_fault != null).map((row) => row.series));
    if (!broken.length) return "";
    const fault = list.find((row) => row.series === broken[0] && row.target_fault != null).target_fault;
    return ` ⚠ Broken target, hollow points: ${clean(broken[0])} (${clean(fault)}); its acceptance says nothing of whether it is right.`
      + (broken.length > 1 ? ` And ${broken.length - 1} more.` : "");
  }

  const COLUMNS = [
    ["Exclusions", (row) => clean(row.weights_label)], ["KV cache", (row) => clean(row.policy_label)],
    ["Depth", (row) => String(row.depth)], ["Tokens / round", plusMinus],
    ["KL, nats per token", (row) => row.kl == null ? "–" : (row.target_fault == null ? "" : "⚠ ") + measured(row.kl, row.kl_error)],
    ["Top-1 as unquantised", (row) => percent(row.top1_agreement)],
    ["Perplexity", (row) => row.perplexity == null ? "–" : (row.kl == null && row.target_fault != null ? "⚠ " : "") + number(row.perplexity) + (row.reference_perplexity ? ` (×${number(row.perplexity / row.reference_perplexity, 3)})` : "")],
    ["Accepted", (row) => row.drafted && row.accepted != null ? percent(row.accepted / row.drafted) : "–"], ["Draft 1", (row) => percent((row.per_position || [])[0])],
    ["Tokens / s", (row) => number(row.tokens_per_second, 0) + (row.odd_timing == null ? "" : " (busy)")], ["Rounds", (row) => number(row.rounds, 0)], ["Tokens", (row) => number(row.tokens, 0)],
    ["KV B/token as deployed", (row) => number(row.kv_bytes_per_token, 0)], ["Weights, MB", (row) => row.target_weight_bytes == null ? "–" : number((row.target_weight_bytes + row.draft_weight_bytes) / 1e6)],
  ];
  const AT_ONCE = 100; // rows of the table that are made before the next frame, a screenful and more
  let filled = "", coming = 0;
  function fillTable(list) {
    const choice = JSON.stringify([$("temperature").value, $("domain").value, [...shown.policies], [...shown.weights]]);
    const mark = (line, row) => { line.className = row.depth === chosenDepth() ? "chosen" : ""; };
    // same rows, another depth: only the mark moves
    if (choice === filled) return $("table").querySelectorAll("tbody tr").forEach((line, at) => mark(line, list[at]));
    filled = choice;
    cancelAnimationFrame(coming);
    const columns = COLUMNS.filter(([, read]) => list.some((row) => !["–", "NaN"].includes(read(row))));
    const table = document.createElement("table"), head = table.createTHead().insertRow(), body = table.createTBody();
    for (const [title] of columns) { const cell = document.createElement("th"); cell.scope = "col"; cell.textContent = title; head.append(cell); }
    const more = (from) => {
      for (const row of list.slice(from, from + AT_ONCE)) {
        const line = body.insertRow();
        mark(line, row);
        for (const [, read] of columns) line.insertCell().textContent = read(row);
      }
      if (from + AT_ONCE < list.length) coming = requestAnimationFrame(() => more(from + AT_ONCE));
    };
    more(0);
    $("table").replaceChildren(table);
  }

  function select(at) {
    if (points[current]) points[current].dot.classList.remove("on");
    current = at;
    const tip = $("tip"), point = points[at];
    tip.hidden = !point;
    if (!point) return;
    point.dot.classList.add("on");
    point.dot.parentNode.append(point.dot);
    const { row } = point, view = $("view").value, title = document.createElement("b");
    title.textContent = clean(point.group.name);
    const text = BY_DEPTH[view]
      ? `depth ${row.depth}: ${plusMinus(row)} tokens per round, ${row.accepted == null ? "" : `${row.accepted} of ${row.drafted} drafts accepted `}in ${row.rounds} rounds`
        + (row.kl == null ? "" : `; target ${measured(row.kl)} nats per token from the unquantised one, top-1 ${percent(row.top1_agreement)}`)
        + (row.target_fault == null ? "" : " ⚠ broken target")
        + (row.tokens_per_second == null ? "" : `; ${number(row.tokens_per_second, 0)} tokens per second`)
        + (row.odd_timing == null ? "" : ` (not to be believed: its rounds took ${row.odd_timing.toPrecision(2)} times what the other rows' trend says)`)
      : `depth ${row.depth}, position ${point.x}: ${number(point.y, 1)} % of ${reached(row, view, point.x)} rounds`
        + (few(view, point) ? ", too few to say more" : "");
    tip.replaceChildren(title, text);
    const box = $("stage").getBoundingClientRect(), size = tip.getBoundingClientRect();
    tip.style.left = Math.max(0, Math.min(point.px + 14, box.width - size.width - 4)) + "px";
    // lines rise with depth and fall with position: the label goes where they are not
    const above = point.py - size.height - 12, below = point.py + 14;
    const fits = below + size.height < box.height - 44;
    tip.style.top = Math.max(0, (BY_DEPTH[view] && fits) || above < 0 ? below : above) + "px";
  }

  $("chart").addEventListener("pointerleave", () => { if (document.activeElement !== $("chart")) select(-1); });
  $("chart").addEventListener("blur", () => select(-1));
  $("chart").addEventListener("keydown", (event) => {
    if (!points.length) return;
    const from = points[current], along = { ArrowLeft: -1, ArrowRight: 1 }[event.key], across = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (event.key === "Escape") return select(-1);
    if (along === undefined && across === undefined) return;
    event.preventDefault();
    if (!from) return select(0);
    if (along) {
      const next = points[current + along];
      if (next && next.index === from.index) select(current + along);
    } else {
      // the same x on the line whose value comes next, up or down the chart
      const column = points.map((point, at) => ({ ...point, at })).filter((point) => point.x === from.x).sort((a, b) => b.y - a.y || a.index - b.index);
      const next = column[column.findIndex((point) => point.at === current) + across];
      if (next) select(next.at);
    }
  });
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  $("toggle").addEventListener("click", () => {
    const table = $("toggle").getAttribute("aria-pressed") !== "true";
    $("toggle").setAttribute("aria-pressed", String(table));
    $("table").hidden = !table; $("chart").toggleAttribute("hidden", table); $("hint").hidden = table;
    select(-1);
    draw();
  });
  $("download").addEventListener("click", () => {
    const own = new Set(labels);
    const plain = rows.map((row) => Object.fromEntries(Object.entries(row).filter(([key]) => !own.has(key))));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([JSON.stringify(plain, null, 1)], { type: "application/json" }));
    link.download = "rows.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  });
  new ResizeObserver(draw).observe($("stage"));
  // a frame below the fold is laid out late: on paper it must not show what was drawn before it had a size
  addEventListener("beforeprint", draw);
  matchMedia("print").addEventListener("change", draw);
  draw();
})();
