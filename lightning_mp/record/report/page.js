"use strict";
// Draws the charts, keeps their steps aligned while one of them is zoomed, and follows the system's light or dark mode.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  // On a touch screen a finger that moves over a chart scrolls the page; the buttons above the charts zoom.
  const touch = matchMedia("(pointer: coarse)");
  const hidden = new Set();
  // Charts whose axis the reader switched, to "log" or "linear".
  const kinds = new Map();
  const content = JSON.parse(document.getElementById("payload").textContent);
  let zoom = null;
  // Up to so many readings have a dot each, and up to so many marks their full size.
  const FEW = 40, TICKS = 7;
  const SYMBOLS = { error: "triangle-down", warning: "diamond" };
  const HOVER = { share: "%{y:.1%}", linear: "%{y:.5~g}", log: "%{y:.4~g}", log2: "%{y:,.6~g}" };

  // Symbols at a height of the plot, 0 to 1; smaller where there are many.
  function symbols(x, height, symbol, size, text, meta) {
    return {
      x, y: x.map(() => height), yaxis: "y2", mode: "markers", marker: { symbol, size: x.length > FEW ? size - 3 : size },
      cliponaxis: false, text, hovertemplate: "%{text}<extra></extra>", meta,
    };
  }

  // The line through the readings, broken where one is not finite: there it has a cross.
  function curve(chart, { x, y, name, dash, band = [], ...meta }) {
    const stepped = chart.traits.includes("stepped"), few = x.length <= FEW && !stepped;
    const gaps = x.filter((_, i) => y[i] === null);
    const cross = symbols(gaps, 0, "x-thin", 8, gaps.map(() => "no number"), { ...meta, role: "gap" });
    const drawn = {
      x, y, name, mode: few ? "lines+markers" : "lines", line: { width: 1.8, dash, shape: stepped ? "hv" : "linear" },
      hovertemplate: HOVER[chart.scale], connectgaps: false, meta: { ...meta, role: "curve" }, ...(few ? { marker: { size: 4 } } : {}),
    };
    const around = band.length ? [interval(x, y, band, name, meta)] : [];
    return [...around, drawn, ...(gaps.length ? [{ ...cross, name, hovertemplate: "%{text}" }] : [])];
  }

  // The area between y - band and y + band, as far as there are numbers.
  function interval(x, y, band, name, meta) {
    const there = x.map((_, i) => i).filter((i) => y[i] !== null), back = [...there].reverse();
    return {
      x: [...there, ...back].map((i) => x[i]), y: [...there.map((i) => y[i] + band[i]), ...back.map((i) => y[i] - band[i])],
      name, mode: "lines", fill: "toself", line: { width: 0 }, hoverinfo: "skip", meta: { ...meta, role: "band" },
    };
  }

  // Alerts are lines from top to bottom with a symbol a severity.
  function marks({ x, text, severity, ...meta }) {
    const role = severity, drawn = { ...symbols(x, 1, SYMBOLS[severity], 10, text, { ...meta, role }), name: severity };
    const line = { mode: "lines", line: { width: 1, dash: "dot" }, hoverinfo: "skip", yaxis: "y2", meta: { ...meta, role } };
    return [{ ...line, x: x.flatMap((step) => [step, step, null]), y: x.flatMap(() => [0, 1, null]) }, drawn];
  }

  // Ticks at powers of two, about seven of them, none beyond a double's range.
  function powers(low, high) {
    const first = Math.floor(Math.log2(low)), last = Math.ceil(Math.log2(high));
    const stride = Math.max(1, Math.ceil((last - first) / TICKS));
    const exponents = [];
    for (let e = first - stride; e < last + 2 * stride; e += stride) if (e >= -1022 && e <= 1023) exponents.push(e);
    return { tickvals: exponents.map((e) => 2 ** e), ticktext: exponents.map((e) => `2<sup>${e}</sup>`) };
  }

  function vertical(chart, low, high) {
    const axis = { title: { text: chart.unit, standoff: 8 }, automargin: "left", fixedrange: true };
    if (chart.scale === "log2") Object.assign(axis, { type: "log" }, powers(low, high));
    else if (chart.scale === "log") Object.assign(axis, { type: "log", exponentformat: "power" });
    else if (chart.scale === "share") axis.tickformat = ".0%";
    else if (chart.traits.includes("stepped") && high - low < TICKS) axis.dtick = 1; // counts have no halves
    if (chart.traits.includes("from-zero")) axis.rangemode = "tozero";
    return axis;
  }

  for (const chart of content.charts) {
    const finite = chart.lines.flatMap((line) => line.y).filter((y) => y !== null);
    const low = finite.reduce((a, b) => Math.min(a, b), Infinity), high = finite.reduce((a, b) => Math.max(a, b), -Infinity);
    chart.data = [...chart.lines.flatMap((line) => curve(chart, line)), ...chart.marks.flatMap(marks)];
    chart.yaxis = vertical(chart, low, high);
    chart.switchable = ["linear", "log"].includes(chart.scale) && low > 0;
  }

  function themed() {
    const style = getComputedStyle(document.documentElement);
    return (name) => style.getPropertyValue(`--${name}`).trim();
  }

  function steps() {
    const [low, high] = content.steps;
    const room = Math.max((high - low) * 0.015, 0.5);
    return zoom || [low - room, high + room];
  }

  const hueName = (trace) => trace.meta.colour.replace(/\d+$/, (n) => n % 8);

  // Runs are hidden in all charts at once, lines in theirs.
  function shown(chart, trace) {
    return !hidden.has(`run ${trace.meta.run}`) && !hidden.has(`${chart.key} ${trace.name}`);
  }

  // The traces as they are drawn now: in the page's colours, without the runs that are switched off.
  function traces(chart, colour) {
    return chart.data.map((trace) => {
      const hue = colour(hueName(trace));
      const dressed = { ...trace, visible: shown(chart, trace) };
      if (trace.line) dressed.line = { ...trace.line, color: hue };
      if (trace.fill) dressed.fillcolor = `${hue}2a`;
      if (trace.marker) {
        const filled = trace.meta.role === "error" || trace.meta.role === "warning";
        dressed.marker = { ...trace.marker, color: hue, line: filled ? { color: colour("card"), width: 1 } : { color: hue, width: 1.5 } };
        if (trace.meta.role === "curve") dressed.marker.line.width = 0;
      }
      return dressed;
    });
  }

  const kind = (chart) => kinds.get(chart.key) || chart.yaxis.type || "linear";

  // What is visible decides the height of the axis, so that a zoom into flat readings shows them.
  function heights(chart) {
    const [from, to] = steps();
    const log = kind(chart) === "log";
    let low = Math.min(...(chart.rules || [])), high = Math.max(...(chart.rules || []));
    for (const trace of chart.data) {
      if ((trace.meta.role !== "curve" && trace.meta.role !== "band") || !shown(chart, trace)) continue;
      trace.y.forEach((y, i) => {
        if (y === null || (log && y <= 0) || trace.x[i] < from || trace.x[i] > to) return;
        const value = log ? Math.log10(y) : y;
        low = Math.min(low, value);
        high = Math.max(high, value);
      });
    }
    if (low > high) return null;
    const room = (high - low) * 0.08 || Math.abs(high) * 0.05 || 0.5;
    const floor = chart.yaxis.rangemode === "tozero" && low >= 0 ? 0 : low - room;
    return [floor, high + room];
  }

  function axis(given, colour, more = "") {
    return {
      ...given, gridcolor: colour("grid"), linecolor: colour("line"), zerolinecolor: colour("grid"), color: colour("quiet"),
      title: { ...given.title, text: given.title.text + more, font: { size: 12, color: colour("quiet") } }, tickfont: { size: 11 },
    };
  }

  function layout(chart, colour) {
    const range = heights(chart);
    // The ticks that came along are for the kind of axis that came along.
    const given = kinds.has(chart.key) ? { ...chart.yaxis, type: kind(chart), dtick: null } : chart.yaxis;
    return {
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
      // The page has legends of its own: they wrap on a phone without taking the chart's room.
      showlegend: false, hovermode: "x unified", margin: { l: 8, r: 14, t: 18, b: 42 },
      paper_bgcolor: colour("card"), plot_bgcolor: colour("card"),
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("text") },
      xaxis: { ...axis({ title: { text: "step", standoff: 6 }, tickformat: ",d" }, colour), range: steps(), autorange: false, showgrid: false, showline: true },
      yaxis: { showticklabels: Boolean(range), ...axis(given, colour, chart.switchable && kind(chart) === "log" ? ", log scale" : ""), ...(range ? { range, autorange: false } : { autorange: true }), zeroline: false },
      hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("text"), size: 12 } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("quiet"), activecolor: colour("text") },
      shapes: (chart.rules || []).map((y) => ({
        type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, layer: "below", line: { width: 1, dash: y ? "dash" : "solid", color: colour("quiet") },
      })),
      dragmode: touch.matches ? false : "zoom",
    };
  }

  const config = {
    responsive: true, displaylogo: false, displayModeBar: touch.matches ? false : "hover", doubleClick: "autosize", showTips: false,
    modeBarButtons: [["toImage"], ["zoomIn2d", "zoomOut2d", "pan2d", "zoom2d", "autoScale2d"]],
  };

  function card(chart) {
    const found = document.getElementById(`chart-${chart.key}`);
    if (found) return found;
    const made = document.createElement("figure");
    made.className = "chart";
    made.id = `chart-${chart.key}`;
    made.innerHTML = '<figcaption><h2></h2><button type="button" class="kind" hidden></button><span class="note"></span></figcaption><div class="keys"></div><div class="plot"></div>';
    document.getElementById("charts").append(made);
    return made;
  }

  // The legend of a chart with several lines of one run; names come escaped.
  function keys(chart) {
    const curves = chart.data.filter((trace) => trace.meta.role === "curve");
    if (curves.length < 2 || curves.some((trace) => trace.meta.run !== curves[0].meta.run)) return [];
    return curves.map((trace) => {
      const key = document.createElement("button");
      key.type = "button";
      key.dataset.hide = `${chart.key} ${trace.name}`;
      key.setAttribute("aria-pressed", String(shown(chart, trace)));
      key.innerHTML = `<i class="swatch ${trace.line.dash}"></i>${trace.name}`;
      key.firstChild.style.setProperty("--colour", `var(--${hueName(trace)})`);
      return key;
    });
  }

  async function drawOne(chart, colour) {
    const place = card(chart);
    place.querySelector("h2").textContent = chart.title;
    place.querySelector(".note").textContent = chart.note || "";
    const other = place.querySelector(".kind");
    other.hidden = !chart.switchable;
    other.textContent = kind(chart) === "log" ? "linear" : "log";
    other.title = `Make the axis ${kind(chart) === "log" ? "linear" : "logarithmic"}`;
    other.dataset.chart = chart.key;
    place.querySelector(".keys").replaceChildren(...keys(chart));
    const plot = place.querySelector(".plot");
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", `${chart.title} over steps, ${chart.unit}`);
    const first = !plot.data;
    await Plotly.react(plot, traces(chart, colour), layout(chart, colour), config);
    if (first) plot.on("plotly_relayout", follow);
  }

  async function draw() {
    const colour = themed();
    const [from, to] = zoom ? zoom.map(Math.round) : content.steps;
    document.getElementById("steps").textContent = `steps ${from.toLocaleString("en")} to ${to.toLocaleString("en")}`;
    content.charts.forEach(card); // all of them, before one measures its column
    await Promise.all(content.charts.map((chart) => drawOne(chart, colour)));
  }

  // One chart was zoomed, moved or reset: all of them show the same steps.
  function follow(change) {
    if (change["xaxis.autorange"]) zoom = null;
    else if (change["xaxis.range[0]"] !== undefined) zoom = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    else if (change["xaxis.range"]) zoom = change["xaxis.range"].slice();
    else return;
    draw();
  }

  function move(way) {
    const [from, to] = steps();
    const width = to - from;
    const changes = { in: [width / 4, -width / 4], out: [-width / 2, width / 2], left: [-width / 3, -width / 3], right: [width / 3, width / 3] };
    const [low, high] = content.steps;
    const next = way === "all" ? null : [from + changes[way][0], to + changes[way][1]];
    if (next === null || (next[0] < low && next[1] > high)) zoom = null;
    else if (next[1] - next[0] >= 1 && next[1] > low && next[0] < high) zoom = next;
    draw();
  }

  function showStep(step) {
    const [low, high] = content.steps;
    const around = Math.max(10, (high - low) / 20);
    zoom = [step - around, step + around];
    draw();
    document.getElementById("charts").scrollIntoView({ behavior: "smooth" });
  }

  // The clipboard may be closed to a page from a file: the text is then selected.
  async function copy(source, button) {
    getSelection().selectAllChildren(source);
    try {
      await navigator.clipboard.writeText(source.textContent);
      button.textContent = "copied";
    } catch {
      button.textContent = document.execCommand("copy") ? "copied" : "selected";
    }
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.dataset.step !== undefined) showStep(Number(button.dataset.step));
    if (button.dataset.zoom !== undefined) move(button.dataset.zoom);
    if (button.dataset.chart !== undefined) {
      kinds.set(button.dataset.chart, button.textContent);
      draw();
    }
    if (button.dataset.copy !== undefined) copy(document.getElementById(button.dataset.copy), button);
    const name = button.dataset.hide;
    if (name === undefined) return;
    if (!hidden.delete(name)) hidden.add(name);
    button.setAttribute("aria-pressed", String(!hidden.has(name)));
    draw();
  });

  dark.addEventListener("change", draw);
  touch.addEventListener("change", draw);
  document.documentElement.dataset.drawn = "no";
  draw().then(() => { document.documentElement.dataset.drawn = "yes"; });
})();
