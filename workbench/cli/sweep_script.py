"""The interactive part of a sweep's page: controls, their style, and the script that redraws two SVG charts.

The script reads the JSON that the page embeds, and asks for nothing else; it works from a file.
"""

CONTROLS = """
<div id="sweep-app" class="app">
<div class="controls">
<label>table <select id="table"></select></label>
<label>source <select id="source"></select></label>
<label>measure <select id="measure"></select></label>
<label>K <input type="range" id="k" min="0" step="1"><output id="k-text"></output></label>
<label>p_min <input type="range" id="p_min" min="0" step="1"><output id="p_min-text"></output></label>
<label>floor <input type="range" id="floor" min="0" step="1"><output id="floor-text"></output></label>
<span id="more"></span>
</div>
<p id="readout" aria-live="polite"></p>
<svg id="by-k" viewBox="0 0 720 320" role="img" aria-label="the measure against K"></svg>
<svg id="by-slot" viewBox="0 0 720 240" role="img" aria-label="acceptance by draft slot"></svg>
<p class="soft">Above: the measure against K at the p_min and floor chosen; bars: intervals; ring: the K chosen.
Below: acceptance by draft slot of the policy chosen; solid: joint, hollow: conditional.</p>
</div>
<noscript><p>The sliders need JavaScript; the figures and the table below do not.</p></noscript>
"""

STYLE = """
.app{background:var(--card);border-radius:8px;padding:14px 16px;margin:14px 0}
.app .controls{display:flex;flex-wrap:wrap;gap:10px 22px;align-items:center}
.app label{display:inline-flex;gap:8px;align-items:center;font-size:14px}
.app output{min-width:4.5em;font-variant-numeric:tabular-nums;color:var(--soft)}
.app svg{width:100%;height:auto;display:block}
.app svg text{fill:var(--ink);font-size:12px}.app svg .axis{stroke:var(--line)}
.app svg .line{stroke:#0072B2;fill:none;stroke-width:2}.app svg .bar{stroke:#0072B2;stroke-width:1.4}
.app svg .dot{fill:#0072B2}.app svg .ring{fill:none;stroke:#D55E00;stroke-width:2.5}
.app svg .plain{stroke:var(--soft);stroke-dasharray:5 4}
.app svg .joint{fill:#009E73}.app svg .cond{fill:none;stroke:#009E73;stroke-width:1.6}
"""

SCRIPT = """
(function () {
  "use strict";
  var data = JSON.parse(document.getElementById("sweep-data").textContent);
  var names = Object.keys(data.columns);
  var rows = data.columns.cell.map(function (_, i) {
    var row = {};
    names.forEach(function (name) { row[name] = data.columns[name][i]; });
    return row;
  }).filter(function (row) { return row.family === "fixed" || row.family === "floor"; });
  rows.forEach(function (row) {
    row.floorName = row.family === "fixed" ? "fixed K" : row.floor === null ? "default" : String(row.floor);
  });
  function distinct(list) { return list.filter(function (x, i) { return list.indexOf(x) === i; }); }
  function column(name, of) { return distinct((of || rows).map(function (row) { return row[name]; })); }
  function ascending(list) {
    return list.filter(function (x) { return x !== null; }).sort(function (a, b) { return a - b; });
  }
  function byId(id) { return document.getElementById(id); }
  function fill(select, values, words) {
    select.replaceChildren();
    values.forEach(function (value) {
      var option = document.createElement("option");
      option.value = String(value);
      option.textContent = (words && words[value]) || String(value) || "(none)";
      select.append(option);
    });
  }
  var ks = ascending(column("k")), pMins = ascending(column("p_min"));
  var floors = column("floorName").sort(function (a, b) {
    function place(x) { return x === "fixed K" ? -2 : x === "default" ? -1 : Number(x); }
    return place(a) - place(b);
  });
  var slide = { k: byId("k"), p_min: byId("p_min"), floor: byId("floor") };
  [["k", ks], ["p_min", pMins], ["floor", floors]].forEach(function (pair) {
    slide[pair[0]].max = String(pair[1].length - 1);
    slide[pair[0]].disabled = pair[1].length < 2;
    slide[pair[0]].value = "0";
  });
  fill(byId("table"), column("table"));
  fill(byId("measure"), Object.keys(data.measures), data.measures);
  if (data.measures[data.objective]) { byId("measure").value = data.objective; }
  var extras = {};  // parameters beside the sliders, where the sweep holds several values of one
  ["pmin0", "statistic", "cap", "floor_context"].forEach(function (name) {
    var values = distinct(rows.filter(function (row) { return reads(row, name); })
      .map(function (row) { return row[name]; }));
    if (values.length < 2) { return; }
    var label = document.createElement("label"), select = document.createElement("select");
    select.id = name;
    label.append(name + " ", select);
    byId("more").append(label, " ");
    fill(select, values);
    extras[name] = select;
    select.addEventListener("change", draw);
  });
  function reads(row, name) {  // whether a parameter acts in this row's policy
    if (row.k === 0) { return false; }
    if (name === "pmin0" || name === "statistic") { return row.p_min > 0; }
    if (name === "cap") { return row.family === "floor"; }
    return row.family === "floor" && row.floor === null;
  }
  function sources() {
    var before = byId("source").value;
    var mine = rows.filter(function (row) { return row.table === byId("table").value; });
    fill(byId("source"), column("source", mine));
    if (column("source", mine).indexOf(before) >= 0) { byId("source").value = before; }
  }
  function find(k, pMin, floor) {
    return rows.find(function (row) {
      if (row.table !== byId("table").value || row.source !== byId("source").value || row.k !== k) { return false; }
      if (k === 0) { return true; }
      if (row.p_min !== pMin || row.floorName !== floor) { return false; }
      return Object.keys(extras).every(function (name) {
        return !reads(row, name) || String(row[name]) === extras[name].value;
      });
    });
  }
  function add(svg, tag, attributes, text) {
    var node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    Object.keys(attributes).forEach(function (name) { node.setAttribute(name, attributes[name]); });
    if (text !== undefined) { node.textContent = text; }
    svg.append(node);
    return node;
  }
  function shown(x, digits) {
    return x === null || x === undefined ? "–" : x.toFixed(digits === undefined ? 3 : digits);
  }
  function frameOf(svg, box, low, high, title) {
    svg.replaceChildren();
    add(svg, "text", { x: box.left, y: 16, "font-weight": 600 }, title);
    for (var i = 0; i <= 4; i++) {
      var value = low + (high - low) * i / 4, y = box.bottom - (box.bottom - box.top) * i / 4;
      add(svg, "line", { "class": "axis", x1: box.left, x2: box.right, y1: y, y2: y });
      add(svg, "text", { x: box.left - 8, y: y + 4, "text-anchor": "end" }, shown(value, 2));
    }
    return function (x) { return box.bottom - (box.bottom - box.top) * (x - low) / (high - low); };
  }
  function drawByK(measure, pMin, floor, k) {
    var box = { left: 60, right: 700, top: 34, bottom: 280 }, svg = byId("by-k");
    var found = ks.map(function (one) { return [one, find(one, pMin, floor)]; })
      .filter(function (pair) { return pair[1] && pair[1][measure] !== null; });
    var all = rows.filter(function (row) {
      return row.table === byId("table").value && row.source === byId("source").value && row[measure] !== null;
    });
    var ends = [];
    all.forEach(function (row) {
      [measure, measure + "_low", measure + "_high"].forEach(function (name) {
        if (row[name] !== null && row[name] !== undefined) { ends.push(row[name]); }
      });
    });
    if (measure === "speedup") { ends.push(1); }
    var low = Math.min.apply(null, ends.length ? ends : [0]), high = Math.max.apply(null, ends.length ? ends : [1]);
    if (high - low < 1e-9) { low -= 0.5; high += 0.5; }
    var y = frameOf(svg, box, low, high, data.measures[measure]);
    function x(one) {
      var at = ks.indexOf(one);
      if (ks.length < 2) { return (box.left + box.right) / 2; }
      return box.left + 20 + (box.right - box.left - 40) * at / (ks.length - 1);
    }
    ks.forEach(function (one) { add(svg, "text", { x: x(one), y: 300, "text-anchor": "middle" }, "K=" + one); });
    if (measure === "speedup") {
      add(svg, "line", { "class": "plain", x1: box.left, x2: box.right, y1: y(1), y2: y(1) });
    }
    add(svg, "polyline", { "class": "line", points: found.map(function (pair) {
      return x(pair[0]) + "," + y(pair[1][measure]);
    }).join(" ") });
    found.forEach(function (pair) {
      var row = pair[1], at = x(pair[0]);
      if (row[measure + "_low"] !== null && row[measure + "_low"] !== undefined) {
        add(svg, "line", { "class": "bar", x1: at, x2: at, y1: y(row[measure + "_low"]),
          y2: y(row[measure + "_high"]) });
      }
      var dot = add(svg, "circle", { "class": "dot", cx: at, cy: y(row[measure]), r: 4 });
      add(dot, "title", {}, row.policy + ": " + shown(row[measure]));
      if (pair[0] === k) { add(svg, "circle", { "class": "ring", cx: at, cy: y(row[measure]), r: 9 }); }
    });
  }
  function drawBySlot(row) {
    var box = { left: 60, right: 700, top: 34, bottom: 200 }, svg = byId("by-slot");
    var y = frameOf(svg, box, 0, 1, "acceptance by draft slot");
    var joint = row ? row.joint : [], step = (box.right - box.left) / Math.max(joint.length, 1);
    joint.forEach(function (value, j) {
      var at = box.left + step * (j + 0.5), cond = row.cond[j];
      add(svg, "text", { x: at, y: 218, "text-anchor": "middle" }, "slot " + (j + 1));
      if (value !== null) {
        add(svg, "rect", { "class": "joint", x: at - step * 0.3, y: y(value), width: step * 0.28,
          height: box.bottom - y(value) });
      }
      if (cond !== null) {
        add(svg, "rect", { "class": "cond", x: at + step * 0.02, y: y(cond), width: step * 0.28,
          height: box.bottom - y(cond) });
      }
    });
  }
  function draw() {
    var k = ks[slide.k.value], pMin = pMins[slide.p_min.value], floor = floors[slide.floor.value];
    byId("k-text").textContent = String(k);
    byId("p_min-text").textContent = String(pMin);
    byId("floor-text").textContent = floor;
    var measure = byId("measure").value, row = find(k, pMin, floor);
    byId("readout").textContent = row ? row.policy + ": " + [
      row.speedup === null ? "" : "speed-up " + shown(row.speedup, 2) + " (" + shown(row.speedup_low, 2) + "–" +
        shown(row.speedup_high, 2) + ")",
      "accepted per round " + shown(row.tau) + " (" + shown(row.tau_low) + "–" + shown(row.tau_high) + ")",
      "tokens per round " + shown(row.emitted_per_round),
      "accepted per drafted " + shown(row.efficiency),
      row.rounds + " rounds of " + row.documents + " documents, " + row.estimator + " walk, temperature " +
        row.temperature
    ].filter(Boolean).join("; ") : "The sweep holds no policy with K=" + k + ", p_min=" + pMin + " and floor " +
      floor + ".";
    drawByK(measure, pMin, floor, k);
    drawBySlot(row);
  }
  byId("table").addEventListener("change", function () { sources(); draw(); });
  byId("source").addEventListener("change", draw);
  byId("measure").addEventListener("change", draw);
  Object.keys(slide).forEach(function (name) { slide[name].addEventListener("input", draw); });
  sources();
  var best = rows.filter(function (row) { return row.source === "all" && row[data.objective] !== null; })
    .sort(function (a, b) { return b[data.objective] - a[data.objective]; })[0];
  if (best) {
    byId("table").value = best.table;
    sources();
    slide.k.value = String(ks.indexOf(best.k));
    slide.p_min.value = String(Math.max(pMins.indexOf(best.p_min), 0));
    slide.floor.value = String(floors.indexOf(best.floorName));
    Object.keys(extras).forEach(function (name) {
      if (reads(best, name)) { extras[name].value = String(best[name]); }
    });
  }
  draw();
})();
"""
