// The table of queries: a page of rows at a time, so that ten thousand queries open as fast as ten.
(() => {
  "use strict";
  const { data } = report;
  const table = document.getElementById("query-table");
  if (table === null) return;
  const element = (id) => document.getElementById(id);
  const [filter, changed, size] = ["query-filter", "query-changed", "page-size"].map(element);
  const buttons = { first: element("page-first"), previous: element("page-previous"), next: element("page-next"), last: element("page-last") };
  const collator = new Intl.Collator("en", { numeric: true });
  const idOrder = new Int32Array(data.queries.length);
  [...data.queries.keys()].sort((a, b) => collator.compare(data.queries[a], data.queries[b])).forEach((query, place) => { idOrder[query] = place; });
  const lowered = data.queries.map((query) => query.toLowerCase());
  const number = new Intl.NumberFormat("en");

  let columns = []; // of the metric: {key, label, kind: "query" | "value" | "difference", path, keys, places}; keys decide the order
  let sorted = { key: null, descending: false };
  let rows = [];
  let page = 0;

  function valueText(value) {
    return value === null ? "–" : value.toFixed(4);
  }

  function differenceText(value, isChanged) {
    if (value === null) return "–";
    return isChanged ? (value < 0 ? "−" : "+") + Math.abs(value).toFixed(4) : "=";
  }

  function makeColumns() {
    const metric = report.metric();
    columns = [{ key: "query", label: "query", kind: "query", keys: idOrder }];
    for (const path of data.paths) {
      if (!report.has(metric, path)) continue;
      const { values, changed: places } = report.column(metric, path);
      columns.push({ key: `value ${path}`, label: path, kind: "value", path, keys: values });
      if (data.reference !== null && path !== data.reference && report.has(metric, data.reference)) {
        columns.push({ key: `change ${path}`, label: `change on ${path}`, kind: "difference", path, keys: report.differences(metric, path), places });
      }
    }
    const known = columns.some((column) => column.key === sorted.key);
    if (!known) {
      const differences = columns.filter((column) => column.kind === "difference");
      const most = differences.reduce((best, column) => (best === null || column.places.size > best.places.size ? column : best), null);
      sorted = { key: (most || columns[0]).key, descending: false };
    }
  }

  function makeHead() {
    const row = document.createElement("tr");
    for (const column of columns) {
      const head = document.createElement("th");
      const button = document.createElement("button");
      head.scope = "col";
      if (column.kind !== "query") head.className = "number";
      button.type = "button";
      button.textContent = column.label;
      button.addEventListener("click", () => {
        // A column's first order: ids and changes from the smallest (largest fall first), values from the largest.
        const again = sorted.key === column.key;
        sorted = { key: column.key, descending: again ? !sorted.descending : column.kind === "value" };
        update();
      });
      head.append(button);
      row.append(head);
    }
    table.tHead.replaceChildren(row);
  }

  function markHead() {
    columns.forEach((column, i) => {
      const direction = column.key === sorted.key ? (sorted.descending ? "descending" : "ascending") : "none";
      table.tHead.rows[0].cells[i].setAttribute("aria-sort", direction);
    });
  }

  function keep() {
    const needle = filter.value.trim().toLowerCase();
    const differences = columns.filter((column) => column.kind === "difference");
    const others = data.paths.filter((path) => path !== data.reference);
    const wanted = changed.value === "*" ? differences : differences.filter((column) => column.path === others[Number(changed.value)]);
    const kept = [];
    for (let i = 0; i < data.queries.length; i += 1) {
      if (needle !== "" && !lowered[i].includes(needle)) continue;
      if (changed.value !== "" && !wanted.some((column) => column.places.has(i))) continue;
      kept.push(i);
    }
    return kept;
  }

  function compare(keys, sign) {
    return (a, b) => {
      if (keys[a] === null || keys[b] === null) return (keys[a] === null) - (keys[b] === null) || idOrder[a] - idOrder[b]; // no value: last
      return sign * (keys[a] - keys[b]) || idOrder[a] - idOrder[b];
    };
  }

  function update() {
    const column = columns.find((entry) => entry.key === sorted.key);
    rows = keep().sort(compare(column.keys, sorted.descending ? -1 : 1));
    page = 0;
    markHead();
    show();
  }

  function cellOf(column, query) {
    const cell = document.createElement(column.kind === "query" ? "th" : "td");
    if (column.kind === "query") {
      const id = document.createElement("bdi");
      id.textContent = data.queries[query];
      cell.scope = "row";
      cell.title = data.queries[query];
      cell.append(id);
      return cell;
    }
    const value = column.keys[query];
    const isChanged = column.kind === "difference" && column.places.has(query);
    cell.className = isChanged && value !== null && value !== 0 ? (value < 0 ? "number fall" : "number rise") : "number";
    cell.textContent = column.kind === "value" ? valueText(value) : differenceText(value, isChanged);
    return cell;
  }

  function show() {
    const length = Number(size.value);
    const pages = Math.max(1, Math.ceil(rows.length / length));
    page = Math.min(Math.max(page, 0), pages - 1);
    const shown = rows.slice(page * length, (page + 1) * length);
    table.tBodies[0].replaceChildren(...shown.map((query) => {
      const row = document.createElement("tr");
      row.append(...columns.map((column) => cellOf(column, query)));
      return row;
    }));
    const order = `sorted by ${columns.find((column) => column.key === sorted.key).label}, ${sorted.descending ? "descending" : "ascending"}`;
    const range = shown.length ? `, rows ${number.format(page * length + 1)} to ${number.format(page * length + shown.length)}` : "";
    element("query-count").textContent = `${report.metric()}: ${number.format(rows.length)} of ${number.format(data.queries.length)} queries${range}, ${order}`;
    element("page-number").textContent = `page ${number.format(page + 1)} of ${number.format(pages)}`;
    buttons.first.disabled = buttons.previous.disabled = page === 0;
    buttons.next.disabled = buttons.last.disabled = page === pages - 1;
  }

  function renew() {
    makeColumns();
    makeHead();
    update();
  }

  const turn = (to) => () => { page = to(); show(); };
  buttons.first.addEventListener("click", turn(() => 0));
  buttons.previous.addEventListener("click", turn(() => page - 1));
  buttons.next.addEventListener("click", turn(() => page + 1));
  buttons.last.addEventListener("click", turn(() => Infinity));
  filter.addEventListener("input", update);
  for (const select of [changed, size]) select.addEventListener("change", update);
  element("query-controls").addEventListener("submit", (event) => event.preventDefault());
  report.onMetric(renew);
  renew();
})();
