// What plots and tables share: the page's data, the metric that is looked at, the values of a path.
const report = (() => {
  "use strict";
  // Objects without a prototype: a path, a metric or a query may be called __proto__ or constructor.
  const bare = (_, value) => (value === null || typeof value !== "object" || Array.isArray(value) ? value : Object.assign(Object.create(null), value));
  const data = JSON.parse(document.getElementById("data").textContent, bare);
  const listeners = [];
  const columns = new Map();
  let metric = data.metric;

  // Values of every query on a path (null: none), and which of them differ from the reference's.
  function column(name, path) {
    const key = JSON.stringify([name, path]);
    if (!columns.has(key)) {
      const entry = data.values[name];
      const values = entry.base.slice();
      const changed = new Set(path === data.base ? [] : entry.paths[path].at);
      if (path !== data.base) entry.paths[path].at.forEach((place, i) => { values[place] = entry.paths[path].value[i]; });
      columns.set(key, { values, changed });
    }
    return columns.get(key);
  }

  function has(name, path) {
    const entry = data.values[name];
    return entry !== undefined && (path === data.base ? entry.base.some((value) => value !== null) : path in entry.paths);
  }

  // Path minus reference for each query; null where one of them has no value.
  function differences(name, path) {
    const { values, changed } = column(name, path);
    const reference = column(name, data.reference).values;
    return values.map((value, i) => (value === null || reference[i] === null ? null : changed.has(i) ? value - reference[i] : 0));
  }

  function compared(name) {
    return data.reference === null ? [] : data.paths.filter((path) => path !== data.reference && has(name, path));
  }

  // The selects of plots and table show one metric.
  const selects = [...document.querySelectorAll("select.metric")];
  for (const select of selects) {
    select.selectedIndex = data.metrics.indexOf(metric); // not by its value: browsers change white space in that
    select.addEventListener("change", () => {
      metric = data.metrics[select.selectedIndex];
      for (const other of selects) other.selectedIndex = select.selectedIndex;
      for (const listener of listeners) listener();
    });
  }

  return { data, column, differences, compared, has, metric: () => metric, onMetric: (listener) => listeners.push(listener) };
})();
