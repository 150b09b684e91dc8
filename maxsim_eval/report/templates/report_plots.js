// The plots: each entry of `builders` makes the traces and layout of one from the page's data and the colours of the theme.
(() => {
  "use strict";
  const { data } = report;
  const SYMBOLS = ["circle", "diamond", "square", "triangle-up", "cross", "x"];
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
  const PRINT_WIDTH = 640; // CSS pixels: fits A4 and Letter between the page's margins
  const MARKED = 400; // points of a trace up to which each has a mark of its own
  const CELLS = 1600; // points of the rank shifts
  const HEIGHT = 330;
  // Neither a logo that links elsewhere nor the button that uploads a plot.
  const CONFIG = {
    displaylogo: false, showSendToCloud: false, plotlyServerURL: "", responsive: true,
    modeBarButtonsToRemove: ["zoom2d", "pan2d", "lasso2d", "select2d", "autoScale2d"],
  };
  const others = data.paths.filter((path) => path !== data.reference);

  // plotly reads some HTML in texts, so whatever comes from a result is escaped.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  // Names often differ at their ends (results/a:fp16, results/a:int8), so a long one is cut in the middle.
  const short = (text) => plain(text.length > 24 ? `${text.slice(0, 10)}…${text.slice(-13)}` : text);
  const count = (value) => value.toLocaleString("en");
  const percent = (share) => (share === 0 ? "0%" : `${(100 * share).toPrecision(2)}%`);
  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  function theme() {
    const colours = Object.fromEntries(["ground", "text", "quiet", "line", "reference", "bound"].map((name) => [name, variable(name)]));
    const series = [0, 1, 2, 3, 4, 5].map((i) => variable(`series-${i}`));
    const of = (path) => (path === data.reference ? colours.reference : series[Math.max(0, others.indexOf(path)) % series.length]);
    return { ...colours, series, of };
  }

  const symbol = (path) => SYMBOLS[(path === data.reference ? 0 : others.indexOf(path) + 1) % SYMBOLS.length];
  const dash = (path) => DASHES[Math.max(0, others.indexOf(path)) % DASHES.length];

  // A row for each name on the vertical axis, the first on top.
  const rows = (names) => ({ tickvals: names.map((_, i) => i), ticktext: names.map(short), range: [names.length - 0.4, -0.6], zeroline: false, showgrid: false });

  const builders = {
    means(colours) {
      const found = data.means[report.metric()] || {};
      const names = data.paths.filter((path) => path in found);
      const traces = names.map((path, i) => ({
        x: [found[path].mean], y: [i], name: plain(path), mode: "markers", text: [plain(path)],
        marker: { size: 11, color: colours.of(path), symbol: symbol(path) },
        error_x: { array: [found[path].half || 0], color: colours.of(path), thickness: 2, width: 6 },
        hovertemplate: found[path].half === null ? "%{text}: %{x:.4f}<extra></extra>" : "%{text}: %{x:.4f} ± %{error_x.array:.4f}<extra></extra>",
      }));
      return { traces, layout: { height: Math.max(HEIGHT, 130 + 42 * names.length), showlegend: false, xaxis: { title: { text: plain(report.metric() || "") } }, yaxis: rows(names) } };
    },

    "gain-bytes": (colours) => gain(colours, "bytes", "bytes a document"),
    "gain-seconds": (colours) => gain(colours, "seconds", "seconds of scoring"),

    differences(colours) {
      const paths = Object.keys(data.differences);
      const metrics = [...new Set(paths.flatMap((path) => Object.keys(data.differences[path])))];
      const place = (metric, path) => metrics.indexOf(metric) + (paths.indexOf(path) + 1) / (paths.length + 1) - 0.5;
      const bounds = { type: "bar", orientation: "h", name: "bound", x: [], y: [], base: [], width: 0.8 / (paths.length + 1), marker: { color: colours.bound, line: { color: colours.quiet, width: 1 } }, hoverinfo: "skip" };
      const traces = paths.map((path) => {
        const entries = Object.entries(data.differences[path]);
        for (const [metric, entry] of entries) {
          if (entry.bound === null) continue;
          bounds.x.push(2 * entry.bound); bounds.base.push(-entry.bound); bounds.y.push(place(metric, path));
        }
        return {
          x: entries.map(([, entry]) => entry.mean), y: entries.map(([metric]) => place(metric, path)), name: plain(path), mode: "markers",
          text: entries.map(([metric, entry]) => `${plain(path)}, ${plain(metric)}: ${plain(entry.verdict)}`),
          marker: { size: 9, color: colours.of(path), symbol: symbol(path) },
          error_x: {
            symmetric: false, color: colours.of(path), thickness: 2, width: 5,
            array: entries.map(([, entry]) => (entry.high === null ? 0 : entry.high - entry.mean)),
            arrayminus: entries.map(([, entry]) => (entry.low === null ? 0 : entry.mean - entry.low)),
          },
          hovertemplate: "%{text}<br>%{x:+.5f} (+%{error_x.array:.5f}, −%{error_x.arrayminus:.5f})<extra></extra>",
        };
      });
      const height = 120 + metrics.length * Math.max(26, 15 * paths.length);
      const xaxis = { title: { text: "path minus reference" }, zeroline: true, zerolinecolor: colours.quiet, zerolinewidth: 1, tickformat: ".2~g" };
      return { traces: [bounds, ...traces], layout: { height, xaxis, yaxis: rows(metrics), showlegend: true } };
    },

    deltas(colours) {
      const metric = report.metric();
      let most = 0;
      const traces = report.compared(metric).map((path) => {
        const changed = report.column(metric, path).changed;
        const all = report.differences(metric, path);
        const places = [...changed].filter((i) => all[i] !== null).sort((a, b) => all[a] - all[b]);
        most = Math.max(most, places.length);
        return {
          x: places.length ? places.map((_, i) => i + 1) : [null], y: places.length ? places.map((i) => all[i]) : [null], text: places.map((i) => plain(data.queries[i])),
          name: `${plain(path)}: ${count(places.length)} of ${count(all.filter((value) => value !== null).length)} changed`,
          mode: places.length > MARKED ? "lines" : "markers", marker: { size: 8, color: colours.of(path), symbol: symbol(path) },
          line: { color: colours.of(path), width: 2, dash: dash(path), shape: "hvh", simplify: true },
          hovertemplate: "query %{text}: %{y:+.4f}<extra></extra>",
        };
      });
      const layout = {
        showlegend: true, xaxis: { title: { text: "changed queries, in order" }, rangemode: "tozero", dtick: most < 10 ? 1 : undefined, zeroline: false },
        yaxis: { title: { text: `change of ${plain(metric)}` }, rangemode: "tozero", zeroline: true, zerolinecolor: colours.quiet },
      };
      if (most === 0) {
        Object.assign(layout.xaxis, { range: [0, 1], showticklabels: false });
        layout.yaxis.range = [-1, 1];
        layout.annotations = [{ text: "No query changed.", x: 0.5, y: 0.5, xref: "paper", yref: "paper", showarrow: false, yshift: 12 }];
        // Without a point nothing would be drawn at all.
        traces.push({ x: [0, 1], y: [0, 0], mode: "lines", line: { color: colours.quiet, width: 2 }, hoverinfo: "skip", showlegend: false });
      }
      return { traces, layout };
    },

    errors(colours) {
      const traces = Object.entries(data.errors).map(([path, found]) => {
        const total = [found.zeros, found.below, found.above, ...found.counts].reduce((sum, value) => sum + value, 0) || 1;
        const shares = found.counts.map((value) => (100 * value) / total);
        const first = Math.max(0, shares.findIndex((value) => value > 0));
        const last = shares.length - [...shares].reverse().findIndex((value) => value > 0);
        const outside = found.below + found.above > 0 ? `, ${percent((found.below + found.above) / total)} outside` : "";
        const x = [], y = [], text = [];
        for (let i = first; i < last; i += 1) { // two points a bin: a flat top that hovering names
          const range = `${found.edges[i].toPrecision(2)} to ${found.edges[i + 1].toPrecision(2)}: ${count(found.counts[i])} pairs`;
          x.push(found.edges[i], found.edges[i + 1]); y.push(shares[i], shares[i]); text.push(range, range);
        }
        return {
          x: [x[0], ...x, x[x.length - 1]], y: [0, ...y, 0], text: ["", ...text, ""], mode: "lines", fill: "tozeroy", fillcolor: `${colours.of(path)}22`,
          name: `${plain(path)}: ${percent(found.zeros / total)} without any${outside}`,
          line: { color: colours.of(path), width: 2, dash: dash(path) }, hovertemplate: "%{text}, %{y:.2f}%<extra></extra>",
        };
      });
      const xaxis = { type: "log", title: { text: "|score − reference score|" }, exponentformat: "power", dtick: 1 };
      return { traces, layout: { showlegend: true, xaxis, yaxis: { title: { text: "% of pairs" }, rangemode: "tozero" } } };
    },

    shifts(colours) {
      const select = document.getElementById("shift-path");
      const path = data.paths.filter((name) => name in data.shifts)[select === null ? 0 : select.selectedIndex];
      const cells = grouped(data.shifts[path]);
      const within = cells.filter(({ from, to }) => from !== 0 && to !== 0);
      const edge = Math.max(2, ...within.map(({ from, to }) => Math.abs(from - to))) * 1.25;
      const place = ({ from, to }) => (from === 0 ? edge : to === 0 ? -edge : from - to);
      const told = ({ from, to, near }) => (near ? "about " : "") + (from === 0 ? `came in, at rank ${to}` : to === 0 ? `fell out, from rank ${from}` : `from rank ${from} to ${to}`);
      const sum = (kept) => count(kept.reduce((total, { documents }) => total + documents, 0));
      const trace = (kept, name, color) => ({
        x: kept.length ? kept.map(({ from, to }) => from || to) : [null], y: kept.length ? kept.map(place) : [null],
        name: `${name}: ${sum(kept)}`, mode: "markers", text: kept.map((cell) => `${told(cell)}: ${count(cell.documents)}`),
        marker: { size: kept.map(({ documents }) => 4 + 3 * Math.log10(Math.max(1, documents))), color, opacity: 0.8, line: { width: 0 } },
        hovertemplate: "%{text}<extra></extra>",
      });
      const still = within.filter(({ from, to }) => from === to);
      const moved = cells.filter(({ from, to }) => from !== to);
      const step = [1, 2, 5, 10, 20, 50, 100].find((size) => edge / size <= 5) || Math.ceil(edge / 5);
      const marks = [0];
      for (let mark = step; mark <= edge - step / 2; mark += step) marks.push(mark, -mark);
      const signed = (mark) => (mark > 0 ? `+${mark}` : String(mark).replace("-", "−"));
      const yaxis = {
        title: { text: `places moved up on ${short(path)}` }, range: [-1.1 * edge, 1.1 * edge], zeroline: false,
        tickvals: [...marks, edge, -edge], ticktext: [...marks.map(signed), "in", "out"],
      };
      return {
        traces: [trace(still, "same rank", colours.reference), trace(moved, "moved", colours.of(path))],
        layout: { showlegend: true, xaxis: { title: { text: `rank on ${short(data.reference || "the reference")}` }, rangemode: "tozero", zeroline: false }, yaxis },
      };
    },

    seconds(colours) {
      const names = data.paths.filter((path) => path in data.seconds);
      const all = [...new Set(names.flatMap((path) => Object.keys(data.seconds[path])))];
      const phases = all.length > 1 ? all.filter((phase) => phase !== "total") : all;
      const traces = phases.map((phase, i) => ({
        type: "bar", orientation: "h", name: plain(phase), x: names.map((path) => data.seconds[path][phase] || 0), y: names.map((_, j) => j),
        text: names.map(plain), textposition: "none", marker: { color: colours.series[i % colours.series.length], line: { color: colours.ground, width: 1 } },
        hovertemplate: `%{text}, ${plain(phase).replace(/%/g, "%%")}: %{x:.3f} s<extra></extra>`,
      }));
      const totals = names.flatMap((path, i) => {
        const total = data.seconds[path].total;
        const end = phases.reduce((sum, phase) => sum + (data.seconds[path][phase] || 0), 0);
        return total === undefined || total === null ? [] : [{ x: end, y: i, text: ` ${total.toPrecision(3)} s`, showarrow: false, xanchor: "left" }];
      });
      return { traces, layout: { barmode: "stack", height: Math.max(HEIGHT, 130 + 42 * names.length), showlegend: true, margin: { r: 64 }, annotations: totals, xaxis: { title: { text: "seconds" }, rangemode: "tozero" }, yaxis: rows(names) } };
    },

    memory(colours) {
      const names = data.paths.filter((path) => path in data.memory);
      const kinds = [["host_peak_bytes", "host"], ["device_peak_bytes", "device"]].filter(([key]) => names.some((path) => data.memory[path][key] !== null));
      const traces = kinds.map(([key, kind], i) => ({
        type: "bar", orientation: "h", name: kind, x: names.map((path) => (data.memory[path][key] || 0) / 2 ** 20), y: names.map((_, j) => j),
        text: names.map(plain), textposition: "none", marker: { color: colours.series[i] }, hovertemplate: `%{text}, ${kind}: %{x:,.0f} MiB<extra></extra>`,
      }));
      return { traces, layout: { barmode: "group", height: Math.max(HEIGHT, 130 + 42 * names.length), showlegend: true, xaxis: { title: { text: "MiB" }, rangemode: "tozero" }, yaxis: rows(names) } };
    },

    "query-lengths": (colours) => lengths(colours, "queries"),
    "document-lengths": (colours) => lengths(colours, "documents"),
  };

  // The mean difference of the metric, with its interval, against what a path costs; the reference is the line at 0.
  function gain(colours, kind, label) {
    const metric = report.metric();
    const costs = data.costs[kind];
    const of = (path) => (path === data.reference ? { mean: 0, low: 0, high: 0 } : (data.differences[path] || {})[metric]);
    const traces = data.paths.filter((path) => path in costs && of(path) !== undefined).map((path) => {
      const found = of(path);
      return {
        x: [costs[path]], y: [found.mean], name: plain(path), mode: "markers+text", text: [short(path)], textposition: "top center",
        marker: { size: 11, color: colours.of(path), symbol: symbol(path) },
        error_y: {
          symmetric: false, color: colours.of(path), thickness: 2, width: 6,
          array: [found.high === null ? 0 : found.high - found.mean], arrayminus: [found.low === null ? 0 : found.mean - found.low],
        },
        hovertemplate: "%{text}: %{x:.4~g}, %{y:+.5f}<extra></extra>",
      };
    });
    const yaxis = { title: { text: `change of ${plain(metric)}` }, zeroline: true, zerolinecolor: colours.quiet, tickformat: "+.2~g" };
    return { traces, layout: { showlegend: false, xaxis: { title: { text: label }, rangemode: "tozero", zeroline: false }, yaxis } };
  }

  // Cells of the rank shifts as {from, to, documents}; neighbours become one (at the middle) where there are too many to draw quickly.
  function grouped(cells) {
    if (cells.length <= CELLS) return cells.map(([from, to, documents]) => ({ from, to, documents, near: false }));
    const limit = Math.max(...cells.map(([from, to]) => Math.max(from, to)));
    const size = Math.ceil(limit / Math.sqrt(CELLS));
    const found = new Map();
    for (const [from, to, documents] of cells) {
      const [left, right] = [Math.ceil(from / size), Math.ceil(to / size)];
      const key = `${left} ${right} ${Math.sign(from - to)}`; // what did not move stays apart
      const middle = (block) => (block === 0 ? 0 : block * size - (size - 1) / 2);
      const [one, other] = [middle(left), middle(right)];
      if (!found.has(key)) found.set(key, { from: one, to: one === other && from !== to ? other + Math.sign(to - from) * size / 4 : other, documents: 0, near: true });
      found.get(key).documents += documents;
    }
    return [...found.values()];
  }

  function lengths(colours, role) {
    const { edges, counts } = data.lengths[role];
    const range = (low, next) => (next - low === 1 ? String(low) : `${low} to ${next - 1}`); // whole lengths below the next edge
    const trace = {
      type: "bar", x: counts.map((_, i) => (edges[i] + edges[i + 1]) / 2), y: counts, width: counts.map((_, i) => edges[i + 1] - edges[i]),
      text: counts.map((value, i) => `${range(edges[i], edges[i + 1])} tokens: ${count(value)}`), textposition: "none",
      marker: { color: colours.series[0], line: { color: colours.ground, width: 1 } }, hovertemplate: "%{text}<extra></extra>",
    };
    return { traces: [trace], layout: { showlegend: false, xaxis: { title: { text: "tokens" } }, yaxis: { title: { text: role } } } };
  }

  function draw(place, colours, width) {
    const { traces, layout } = builders[place.dataset.plot](colours);
    const axis = { gridcolor: colours.line, linecolor: colours.quiet, tickcolor: colours.quiet, automargin: true, zerolinecolor: colours.line };
    const height = layout.height || HEIGHT;
    place.style.minHeight = `${height}px`;
    Plotly.react(place, traces, {
      ...layout, height, ...(width ? { width, autosize: false } : { autosize: true }),
      margin: { l: 56, r: 16, t: 8, b: 52, ...layout.margin }, font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colours.text },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest",
      hoverlabel: { bgcolor: colours.ground, bordercolor: colours.quiet, font: { color: colours.text } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colours.quiet, activecolor: colours.text },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", bgcolor: "rgba(0,0,0,0)", traceorder: "normal" },
      xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis },
    }, CONFIG);
    place.querySelector("svg").setAttribute("aria-hidden", "true"); // title, caption and tables say what it shows
  }

  // What a plot shows, as a table: for those who do not see it, and for the keyboard.
  const MOST_VALUES = 500;
  function fillValues(details) {
    const { traces, layout } = builders[details.dataset.values](theme());
    const axes = [layout.xaxis, layout.yaxis].map((axis) => axis?.title?.text || "");
    const lines = [];
    for (const trace of traces) {
      if (trace.hoverinfo === "skip") continue;
      trace.x.forEach((x, i) => {
        if (x === null || lines.length >= MOST_VALUES) return;
        const told = Array.isArray(trace.text) ? trace.text[i] : "";
        lines.push([trace.name || "", told === trace.name ? "" : told || "", x, trace.y[i]]);
      });
    }
    const written = (value) => (typeof value === "number" ? String(Number(value.toPrecision(6))) : String(value));
    const decoded = document.createElement("textarea"); // plotly's texts are escaped for it
    const table = document.createElement("table");
    const row = (cells, kind) => {
      const found = document.createElement("tr");
      found.append(...cells.map((text) => {
        const cell = document.createElement(kind);
        decoded.innerHTML = text;
        cell.textContent = decoded.value;
        return cell;
      }));
      return found;
    };
    table.createTHead().append(row(["series", "what", axes[0] || "x", axes[1] || "y"], "th"));
    table.createTBody().append(...lines.map((cells) => row(cells.map(written), "td")));
    details.querySelector(".scroll").replaceChildren(table);
  }
  for (const details of document.querySelectorAll("details.values")) {
    details.addEventListener("toggle", () => { if (details.open) fillValues(details); });
  }

  const every = [...document.querySelectorAll("[data-plot]")];
  const shown = (place) => place.closest("details:not([open])") === null;
  const redraw = (kept, width) => { const colours = theme(); for (const place of kept) if (shown(place)) draw(place, colours, width); };
  const named = (...names) => every.filter((place) => names.includes(place.dataset.plot));

  // One plot a task, so that the page answers while they are drawn; those in folded parts when these are opened.
  function drawFrom(places, next, done) {
    if (next < places.length) {
      redraw([places[next]]);
      setTimeout(() => drawFrom(places, next + 1, done), 0);
    } else {
      done();
    }
  }
  const mark = (drawn) => () => { document.documentElement.dataset.plots = drawn; };
  setTimeout(() => drawFrom(every.filter(shown), 0, mark("drawn")), 0);
  for (const details of document.querySelectorAll("details.more")) {
    details.addEventListener("toggle", () => { if (details.open) drawFrom(every.filter((place) => details.contains(place)), 0, mark("all")); });
  }

  report.onMetric(() => redraw(named("means", "deltas", "gain-bytes", "gain-seconds")));
  const select = document.getElementById("shift-path");
  if (select !== null) select.addEventListener("change", () => redraw(named("shifts")));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw(every));
  let folded = [];
  window.addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open], .values)")];
    for (const details of folded) details.open = true;
    document.documentElement.dataset.theme = "light";
    redraw(every, PRINT_WIDTH);
  });
  window.addEventListener("afterprint", () => {
    delete document.documentElement.dataset.theme;
    for (const details of folded) details.open = false;
    redraw(every);
  });
})();
