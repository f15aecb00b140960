"use strict";
(() => {
const $ = (q, e = document) => e.querySelector(q), $$ = (q, e = document) => [...e.querySelectorAll(q)];
const make = (name, text, attributes = {}) => {
  const e = document.createElement(name);
  if (text !== undefined) e.textContent = text;
  for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
  return e;
};
const known = (v, unit) => v === null ? "–" : v.toLocaleString("en", {maximumSignificantDigits: 4}) + unit;
const near = v => v === 0 ? "0" : Number(v.toPrecision(3)).toLocaleString("en", {maximumSignificantDigits: 3});

// Theme: as the system has it, until chosen.
const root = document.documentElement, theme = $("#theme");
const stored = () => { try { return localStorage.getItem("rankwise-theme"); } catch { return null; } };
const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
if (stored()) root.dataset.theme = stored();
const nameTheme = () => { theme.textContent = dark() ? "Light theme" : "Dark theme"; };
if (theme) {
  nameTheme();
  theme.hidden = false;
  theme.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("rankwise-theme", root.dataset.theme); } catch { /* a file may have no storage */ }
    nameTheme();
  });
}

// Charts: values on pointer and arrow keys, series on and off, linear and logarithmic.
function rescale(svg, log) {
  const [a, b] = (log ? svg.dataset.log : svg.dataset.lin).split(",").map(Number);
  const [p, q] = svg.dataset.px.split(",").map(Number), horizontal = svg.dataset.axis === "x";
  const at = v => {
    const share = log ? (Math.log(Math.max(v, a)) - Math.log(a)) / (Math.log(b) - Math.log(a)) : (v - a) / (b - a);
    return (p + share * (q - p)).toFixed(1);
  };
  for (const e of $$(".v", svg)) {
    const v = e.dataset.v.split(",").map(Number);
    if (e.tagName === "circle") e.setAttribute(horizontal ? "cx" : "cy", at(v[0]));
    else if (e.tagName === "line") {
      e.setAttribute(horizontal ? "x1" : "y1", at(v[0]));
      e.setAttribute(horizontal ? "x2" : "y2", at(v[1]));
    } else {
      const xs = e.dataset.x.split(",");
      e.setAttribute("d", "M" + v.map((y, i) => xs[i] + " " + at(y)).join("L") + (e.classList.contains("band") ? "Z" : ""));
    }
  }
  svg.classList.toggle("log", log);
  svg.classList.toggle("lin", !log);
}
function chart(figure) {
  const svg = $("svg", figure), plot = $(".plot", figure), tip = $(".tip", figure);
  if (!svg || !plot) return;
  let on = null;
  const marks = () => $$(".m", svg).filter(e => !e.closest(".off"));
  const show = e => {
    if (on) on.classList.remove("on");
    on = e;
    if (e) { e.classList.add("on"); tip.textContent = e.dataset.t; } else tip.textContent = tip.dataset.hint;
  };
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), k = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * k, y = (event.clientY - box.top) * k;
    let best = event.target.closest && event.target.closest(".m"), least = 24;
    if (!best) for (const e of marks()) {
      const b = e.getBBox(), d = Math.hypot(b.x + b.width / 2 - x, b.y + b.height / 2 - y);
      if (d < least) { least = d; best = e; }
    }
    if (best) show(best);
  });
  plot.addEventListener("keydown", event => {
    const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key], all = marks();
    if (event.key === "Escape") return show(null);
    if (!all.length || (!step && event.key !== "Home" && event.key !== "End")) return;
    event.preventDefault();
    const now = all.indexOf(on);
    show(event.key === "Home" ? all[0] : event.key === "End" ? all[all.length - 1]
      : all[now < 0 ? (step > 0 ? 0 : all.length - 1) : (now + step + all.length) % all.length]);
  });
  for (const button of $$("[data-s]", $(".tools", figure))) button.addEventListener("click", () => {
    const off = button.getAttribute("aria-pressed") === "true";
    button.setAttribute("aria-pressed", String(!off));
    $(`g[data-s="${button.dataset.s}"]`, svg).classList.toggle("off", off);
    if (on && on.closest(".off")) show(null);
  });
  const scale = $(".scale", figure);
  if (scale) scale.addEventListener("click", () => {
    const log = !svg.classList.contains("log");
    rescale(svg, log);
    scale.textContent = log ? "Scale: logarithmic" : "Scale: linear";
  });
}

// Tables: sort by a column, keep rows that hold a text.
const value = text => {
  const found = /^\s*([-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?)(?:\s([KMG])iB\b)?/i.exec(text);
  return found ? parseFloat(found[1].replace(/,/g, "")) * 1024 ** ("KMG".indexOf(found[2] || " ") + 1) : null;
};
// What is unknown is last in both directions: the fastest first must not begin with those that failed.
const unknown = text => text === "" || text === "–";
const compare = (a, b, sign) => {
  if (unknown(a) !== unknown(b)) return unknown(a) ? 1 : -1;
  const x = value(a), y = value(b);
  if (x !== null && y !== null) return sign * (x - y);
  if (x !== null || y !== null) return x !== null ? -sign : sign;
  return sign * a.localeCompare(b, "en", {numeric: true});
};
function sortable(table, apply) {
  const heads = $$("thead th", table);
  heads.forEach((th, column) => {
    const button = make("button", th.textContent, {type: "button"});
    th.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = th.getAttribute("aria-sort") === "ascending";
      heads.forEach(other => other.removeAttribute("aria-sort"));
      th.setAttribute("aria-sort", down ? "descending" : "ascending");
      apply(column, down ? -1 : 1);
    });
  });
}
function plain(table) {
  const body = $("tbody", table), text = (row, column) => row.cells[column] ? row.cells[column].textContent : "";
  sortable(table, (column, sign) => {
    body.append(...[...body.rows].sort((a, b) => compare(text(a, column), text(b, column), sign)));
  });
  const box = table.closest(".tabled"), input = box && $("input", box);
  if (!input) return;
  $(".filter", box).hidden = false;
  input.addEventListener("input", () => {
    const wanted = input.value.toLowerCase();
    let count = 0;
    for (const row of body.rows) {
      row.hidden = !row.textContent.toLowerCase().includes(wanted);
      count += !row.hidden;
    }
    $("output", box).textContent = `${count} of ${body.rows.length} rows`;
  });
}

// Cells: all of them are data; the table shows those that are asked for.
const SHOWN = 200;
function cells() {
  const data = $("#cells-data"), table = $("#cells-table");
  if (!data || !table) return;
  const all = JSON.parse(data.textContent), body = $("tbody", table), input = $("#cells-filter"), out = $("#cells-count");
  const dialog = $("#cell");
  let rows = all.cells, order = null, limit = SHOWN;
  const draw = () => {
    const wanted = input.value.toLowerCase();
    rows = all.cells.filter(c => c.row.join(" ").toLowerCase().includes(wanted) || c.key.includes(wanted));
    if (order) rows = [...rows].sort((a, b) => compare(String(a.row[order[0]]), String(b.row[order[0]]), order[1]));
    body.replaceChildren(...rows.slice(0, limit).map(c => {
      const tr = make("tr");
      c.row.forEach((text, i) => {
        const td = make("td", i === 1 ? undefined : text, {class: i < 3 ? "t" : "n"});
        if (i === 1) {
          const button = make("button", text, {class: "link", type: "button"});
          button.addEventListener("click", () => open(c));
          td.append(button);
        }
        tr.append(td);
      });
      return tr;
    }));
    out.textContent = `${Math.min(limit, rows.length)} of ${rows.length} cells`;
    $("#cells-more").hidden = rows.length <= limit;
  };
  const decode = text => {
    const digit = i => { const c = text.charCodeAt(i); return c === 45 ? 62 : c === 95 ? 63 : c < 58 ? c + 4 : c < 91 ? c - 65 : c - 71; };
    const found = [];
    for (let i = 0; i + 1 < text.length; i += 2) found.push((64 * digit(i) + digit(i + 1)) / 4095);
    return found;
  };
  const drawSamples = c => {
    if (!c.range) return null;
    const [low, high] = c.range, series = c.repeats.filter(r => r[4]).map(r => [r[0], decode(r[4])]);
    if (!series.length) return null;
    const ns = "http://www.w3.org/2000/svg", svg = document.createElementNS(ns, "svg");
    svg.setAttribute("viewBox", "0 0 640 260");
    svg.setAttribute("aria-hidden", "true");
    const put = (name, attributes, text) => {
      const e = document.createElementNS(ns, name);
      for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
      if (text !== undefined) e.textContent = text;
      svg.append(e);
    };
    const ms = share => 1000 * low * Math.pow(high / low, share);
    for (const share of [0, 0.25, 0.5, 0.75, 1]) {
      const y = 225 - 205 * share;
      put("path", {d: `M60 ${y}H630`, stroke: "var(--line)", fill: "none"});
      put("text", {x: 54, y: y + 4, "text-anchor": "end"}, near(ms(share)));
      put("text", {x: 60 + 570 * share, y: 243, class: "mid"}, `${100 * share} %`);
    }
    series.forEach(([repeat, q], i) => put("path", {class: `line c${i % 7}`, d: "M" + q.map((v, j) =>
      `${(60 + 570 * (q.length < 2 ? 0.5 : j / (q.length - 1))).toFixed(1)} ${(225 - 205 * v).toFixed(1)}`).join("L")}));
    put("text", {x: 345, y: 258, class: "mid"}, `share of samples; ${c.samples}, ms (logarithmic)`);
    return svg;
  };
  const open = c => {
    const box = $("#cell-body");
    box.replaceChildren(make("p", `${c.row[0]} · key ${c.key} · ${c.row[2]}`, {class: "note"}));
    if (c.why) box.append(make("p", c.why));
    const drawn = drawSamples(c);
    if (drawn) box.append(make("h3", "Samples of each repeat"), drawn);
    const wrap = make("div", undefined, {class: "wrap", tabindex: "0", role: "group", "aria-label": "Repeats"});
    const grid = make("table"), head = make("tr"), rowsBody = make("tbody"), top = make("thead");
    for (const name of ["repeat", "state", all.unit, "CPU taken by others", "record"]) head.append(make("th", name, {scope: "col"}));
    for (const r of c.repeats) {
      const tr = make("tr"), path = `records/${c.key}/${all.record.replace("{repeat}", r[0]).replace("{attempt}", r[5])}`, link = root.dataset.unlinked === undefined ? make("a", path, {href: path}) : make("span", path);
      tr.append(make("td", r[0]), make("td", r[1] || "completed"), make("td", known(r[2], "")), make("td", known(r[3], " %")), make("td"));
      tr.lastChild.append(link);
      rowsBody.append(tr);
    }
    top.append(head);
    grid.append(top, rowsBody);
    wrap.append(grid);
    box.append(make("h3", "Repeats"), wrap);
    $("#cell-title").textContent = c.row[1];
    dialog.showModal();
  };
  sortable(table, (column, sign) => { order = [column, sign]; draw(); });
  input.addEventListener("input", () => { limit = SHOWN; draw(); });
  $("#cells-more").addEventListener("click", () => { limit *= 4; draw(); });
  $("#cell-close").addEventListener("click", () => dialog.close());
  $("#cells-tools").hidden = false;
  draw();
  const go = () => {
    const found = all.cells.find(c => location.hash === `#cell-${c.key}`);
    if (found && !dialog.open) open(found);
  };
  addEventListener("hashchange", go);
  go();
}

// Site: the page of the comparison of two runs.
function site() {
  const data = $("#pairs");
  if (!data) return;
  const pairs = JSON.parse(data.textContent), first = $("#first"), second = $("#second"), out = $("#compared");
  // The newest run against the one before it with the same cells.
  const [one, two] = Object.keys(pairs)[0] ? Object.keys(pairs)[0].split(",").map(Number).sort((a, b) => b - a) : [1, 0];
  if (one < first.options.length) first.selectedIndex = one;
  second.selectedIndex = two;
  $("#go").hidden = false;
  $("#go").addEventListener("click", () => {
    const page = pairs[`${first.value},${second.value}`];
    if (page) location.href = page;
    else out.textContent = first.value === second.value ? "These are the same run." : "No comparison: the runs have no cell in common, or there are too many pairs.";
  });
}

function start() {
  $$("figure.chart").forEach(chart);
  $$(".tabled table").forEach(plain);
  cells();
  site();
}
start();

// Live: the page of a run that is under way is fetched again when the run has moved on.
const live = root.dataset.live;
if (live) {
  let seen = live;
  setInterval(async () => {
    try {
      const version = await (await fetch("version", {cache: "no-store"})).text();
      if (version === seen || $("dialog[open]")) return;
      const fresh = new DOMParser().parseFromString(await (await fetch(".", {cache: "no-store"})).text(), "text/html");
      const opened = $$("details[open]").map(e => e.dataset.name);
      $("main").replaceWith(document.adoptNode($("main", fresh)));
      $$("details").forEach(e => { if (opened.includes(e.dataset.name)) e.open = true; });
      seen = version;
      start();
    } catch { /* the server has ended: what is shown stays */ }
  }, 2000);
}
})();
