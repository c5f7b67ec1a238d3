// What the page does beyond showing text: charts, and what is chosen in it, kept in the address behind #.
"use strict";
(() => {
  const LINE_COLOURS = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5", "--line-6"];
  const DASHES = [[], [6, 3], [2, 3], [10, 3, 2, 3]];
  const CHART_HEIGHT_PX = 220;
  const cursors = uPlot.sync("step");
  let charts = [];

  // A colour of the style sheet as a canvas takes it: light or dark is decided by then.
  function colour(name) {
    const probe = document.createElement("span");
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  }

  function number(value) {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(2);
    return String(Number(value.toPrecision(4)));
  }

  // One line a run and metric that there is; runs differ in colour, metrics of one run in colour and dash.
  function linesOf(chart, runs) {
    const lines = [];
    runs.forEach((run, runPlace) => {
      chart.lines.forEach((line, linePlace) => {
        const points = run.series[line.metric];
        if (!points) return;
        const place = runs.length > 1 ? runPlace : linePlace - (chart.lines[0].is_faint ? 1 : 0);
        const label = runs.length > 1 ? `${run.name}, ${line.label}` : line.label;
        lines.push({ points, label, is_faint: line.is_faint, place: Math.max(0, place) });
      });
    });
    return lines;
  }

  function series(line) {
    const stroke = colour(LINE_COLOURS[line.place % LINE_COLOURS.length]);
    return {
      label: line.label,
      stroke,
      width: line.is_faint ? 1 : 2,
      alpha: line.is_faint ? 0.4 : 1,
      dash: line.is_faint ? [] : DASHES[Math.floor(line.place / LINE_COLOURS.length) % DASHES.length],
      spanGaps: false,
      points: { show: line.points[0].length < 30, size: line.is_faint ? 4 : 6 },
      value: (_, value) => number(value),
    };
  }

  function draw(place, data) {
    const chart = data.charts[place.dataset.chart];
    const lines = linesOf(chart, data.runs);
    if (!lines.length) return;
    const axis = { stroke: colour("--faint"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    const options = {
      width: place.clientWidth,
      height: CHART_HEIGHT_PX,
      cursor: { sync: { key: cursors.key }, drag: { x: true, y: false } },
      scales: {
        x: { time: false },
        y: { range: (_, low, high) => uPlot.rangeNum(chart.from_zero ? Math.min(0, low) : low, high, 0.08, true) },
      },
      axes: [
        { ...axis, size: 34, values: (_, steps) => steps.map((step) => (Number.isInteger(step) ? step : "")) },
        { ...axis, size: 62, values: (_, values) => values.map(number) },
      ],
      series: [{ label: "step", value: (_, step) => (step == null ? "–" : step) }, ...lines.map(series)],
    };
    const drawn = new uPlot(options, uPlot.join(lines.map((line) => line.points)), place);
    follow(drawn);
    charts.push(drawn);
  }

  // A finger moves the cursor along; up and down it scrolls the page.
  function follow(chart) {
    chart.over.addEventListener("pointermove", (event) => {
      if (event.pointerType !== "touch") return;
      const box = chart.over.getBoundingClientRect();
      chart.setCursor({ left: event.clientX - box.left, top: event.clientY - box.top });
    });
  }

  function drawAll() {
    charts.forEach((chart) => chart.destroy());
    charts = [];
    const data = JSON.parse(document.getElementById("data").textContent);
    document.querySelectorAll("[data-chart]").forEach((place) => draw(place, data));
  }

  function resize() {
    for (const chart of charts) {
      chart.setSize({ width: chart.root.parentElement.clientWidth, height: CHART_HEIGHT_PX });
    }
  }

  function localTimes() {
    document.querySelectorAll("time").forEach((time) => {
      time.textContent = new Date(time.dateTime).toLocaleString();
    });
  }

  localTimes();
  drawAll();
  addEventListener("resize", resize);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
})();
