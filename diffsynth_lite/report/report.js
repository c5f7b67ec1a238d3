// Charts, and the reader's choices, which are kept in the address after #.
"use strict";
(() => {
  const LINE_COLOURS = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5", "--line-6"];
  const DASHES = [[], [6, 3], [2, 3], [10, 3, 2, 3]];
  const CHART_HEIGHT_PX = 180;
  const FEW_ROWS = 10;
  const SILENT_S = 600;
  const cursors = uPlot.sync("step");
  let charts = [];

  // A colour of the style sheet as a canvas takes it: light or dark is decided by then.
  function colour(name, percent = 100) {
    const probe = document.createElement("span");
    probe.style.color = `color-mix(in srgb, var(${name}) ${percent}%, transparent)`;
    document.body.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  }

  function number(value) {
    if (value == null) return "";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-4 || size >= 1e5)) return value.toExponential(2);
    return String(Number(value.toPrecision(4)));
  }

  // One line a metric that there is; of several runs one a run and metric, in the run's colour, without faint ones.
  function linesOf(chart, runs) {
    const bold = chart.lines.filter((line) => !line.is_faint);
    if (runs.length > 1) {
      const metrics = bold.filter(({ metric }) => runs.some((run) => run.series[metric]));
      return runs.flatMap((run, place) => linesOfRun(metrics, run, place));
    }
    return chart.lines.flatMap((line) => {
      const points = runs[0].series[line.metric];
      return points ? [{ ...line, points, colour: Math.max(0, bold.indexOf(line)), dash: 0 }] : [];
    });
  }

  function linesOfRun(metrics, run, place) {
    return metrics.flatMap(({ metric, label }, dash) => {
      const points = run.series[metric];
      const name = metrics.length > 1 ? `${run.name}, ${label}` : run.name;
      return points ? [{ points, label: name, is_faint: false, colour: place, dash }] : [];
    });
  }

  function series(line) {
    const stroke = colour(LINE_COLOURS[line.colour % LINE_COLOURS.length], line.is_faint ? 45 : 100);
    const dash = line.dash + Math.floor(line.colour / LINE_COLOURS.length);
    return {
      label: line.label,
      stroke,
      width: line.is_faint ? 1 : 2,
      dash: DASHES[dash % DASHES.length],
      spanGaps: false,
      points: { show: line.points[0].length < 30, size: line.is_faint ? 4 : 6 },
      value: (_, value) => number(value),
    };
  }

  // The area between the lines of both ends of an interval.
  function intervals(lines) {
    const [low, high] = ["_low", "_high"].map((end) => lines.findIndex((line) => line.metric?.endsWith(end)) + 1);
    return low && high ? [{ series: [high, low], fill: colour(LINE_COLOURS[0], 15) }] : [];
  }

  function valueScale(chart) {
    if (chart.is_log) return { distr: 3, range: (_, low, high) => uPlot.rangeLog(low, high, 10, true) };
    const from = (low) => (chart.from_zero ? Math.min(0, low) : low);
    return { range: (_, low, high) => uPlot.rangeNum(from(low), high, 0.08, true) };
  }

  function draw(place, data) {
    const chart = data.charts[place.dataset.chart];
    const lines = linesOf(chart, data.runs);
    if (!lines.length) return;
    const axis = { stroke: colour("--ink-2"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    const options = {
      width: place.clientWidth,
      height: CHART_HEIGHT_PX,
      padding: [10, 14, 0, 0],
      cursor: { sync: { key: cursors.key }, drag: { x: true, y: false }, y: false },
      scales: {
        x: { time: false },
        y: valueScale(chart),
      },
      axes: [
        { ...axis, size: 26, values: (_, steps) => steps.map((step) => (Number.isInteger(step) ? step : "")) },
        { ...axis, size: 62, values: (_, values) => values.map((value) => (value == null ? "" : number(value))) },
      ],
      // What a line has where nobody points is nothing, so that its place stays empty.
      hooks: { setCursor: [({ root, cursor }) => root.classList.toggle("pointed", cursor.idx != null)] },
      series: [{ label: "step", value: (_, step) => step ?? "" }, ...lines.map(series)],
      bands: intervals(lines),
    };
    place.classList.toggle("single", lines.length === 1);
    const drawn = new uPlot(options, uPlot.join(lines.map((line) => line.points)), place);
    follow(drawn);
    charts.push(drawn);
  }

  // A finger moves the cursor along; up and down it scrolls the page.
  function follow(chart) {
    chart.over.addEventListener("pointermove", (event) => {
      if (event.pointerType !== "touch") return;
      const box = chart.over.getBoundingClientRect();
      chart.setCursor({ left: event.clientX - box.left, top: event.clientY - box.top }, true, true);
    });
  }

  // The part of the steps that a reader zoomed into, or undefined.
  function zoomOf(chart) {
    const { min, max } = chart.scales.x;
    const steps = chart.data[0];
    return min > steps[0] || max < steps.at(-1) ? { min, max } : undefined;
  }

  function drawAll() {
    const zooms = new Map(charts.map((chart) => [chart.root.parentElement?.dataset.chart, zoomOf(chart)]));
    charts.forEach((chart) => chart.destroy());
    charts = [];
    const data = JSON.parse(document.getElementById("data").textContent);
    document.querySelectorAll("[data-chart]").forEach((place) => draw(place, data));
    charts.forEach((chart) => {
      const zoom = zooms.get(chart.root.parentElement.dataset.chart);
      if (zoom) chart.setScale("x", zoom);
    });
  }

  function resize() {
    for (const chart of charts) {
      chart.setSize({ width: chart.root.parentElement.clientWidth, height: CHART_HEIGHT_PX });
    }
  }

  // --- the reader's choices, kept in the address after #, so that a link shows the same

  const chosen = new URLSearchParams(location.hash.slice(1));

  function remember(name, value) {
    if (value === "" || value == null) chosen.delete(name);
    else chosen.set(name, value);
    history.replaceState(null, "", `#${chosen}`);
  }

  // --- light and dark

  const THEMES = { "": "as the system", light: "light", dark: "dark" };

  function showTheme() {
    const theme = chosen.get("theme") ?? "";
    document.documentElement.dataset.theme = theme;
    document.querySelector("#theme small").textContent = THEMES[theme] ?? THEMES[""];
  }

  function startTheme() {
    const button = document.querySelector(".index #theme");
    if (!button) return; // the page of a server that has a theme of its own
    button.hidden = false;
    button.addEventListener("click", () => {
      const names = Object.keys(THEMES);
      remember("theme", names[(names.indexOf(chosen.get("theme") ?? "") + 1) % names.length]);
      showTheme();
    });
    showTheme();
  }

  // --- previews: two of one prompt on top of each other, with a line to drag between them

  const { element, slider } = comparison;

  function shown(link) {
    const { src, alt } = link.querySelector("img");
    return { src, alt, video: link.dataset.video, label: `step ${link.dataset.step}` };
  }

  function startPreviews(section) {
    const prompts = [...section.querySelectorAll(".strip")].map((strip) => [...strip.querySelectorAll("a")]);
    const viewer = section.querySelector("[data-viewer]");

    function show(promptPlace, linkPlace) {
      const links = prompts[promptPlace];
      const [before, after] = [links[0], links[linkPlace]];
      const { compare, after: other } = comparison.make(shown(before), shown(after), {
        name: "how much of the first preview is shown",
        split: chosen.get("split") ?? 50,
        onSplit: (split) => remember("split", split),
      });
      viewer.querySelector(".compare")?.remove();
      viewer.prepend(compare);
      const prompt = section.querySelectorAll(".prompt h3")[promptPlace].textContent;
      Object.assign(viewer.querySelector("h3"), { textContent: prompt, title: prompt });
      other.muted = !audio.checked;
      step.max = links.length - 1;
      step.value = linkPlace;
      output.textContent = `step ${after.dataset.step}`;
      section.querySelectorAll("[aria-current]").forEach((link) => link.removeAttribute("aria-current"));
      after.setAttribute("aria-current", "true");
      prompts.forEach((each) => reveal(each[Math.min(linkPlace, each.length - 1)]));
      current = promptPlace;
    }

    // Scrolls only its strip, not the page; how far is known when all images are there.
    function reveal(link) {
      const strip = link.parentElement;
      strip.scrollLeft = link.offsetLeft - strip.offsetLeft + (link.offsetWidth - strip.clientWidth) / 2;
      if (document.readyState !== "complete") addEventListener("load", () => reveal(link), { once: true });
    }

    function choose(promptPlace, linkPlace) {
      show(promptPlace, linkPlace);
      remember("prompt", promptPlace);
      remember("step", prompts[promptPlace][linkPlace].dataset.step);
    }

    let current = 0;
    const output = element("output", {});
    const audio = element("input", { type: "checkbox" });
    const step = slider(0, 0, "training step");
    step.addEventListener("input", () => choose(current, Number(step.value)));
    audio.addEventListener("change", () => {
      viewer.querySelector(".after").muted = !audio.checked;
    });
    viewer.append(element("label", {}, output, step), element("h3", {}));
    if ("audio" in section.dataset) {
      viewer.append(element("label", { className: "audio" }, audio, "audio of the later step"));
    }
    viewer.hidden = false;
    prompts.forEach((links, promptPlace) =>
      links.forEach((link, linkPlace) =>
        link.addEventListener("click", (event) => {
          if (event.ctrlKey || event.metaKey || event.shiftKey) return;
          event.preventDefault();
          choose(promptPlace, linkPlace);
          viewer.scrollIntoView({ block: "nearest" });
        }),
      ),
    );
    const first = Math.min(Number(chosen.get("prompt") ?? 0) || 0, prompts.length - 1);
    const asked = prompts[first].findIndex((link) => link.dataset.step === chosen.get("step"));
    show(first, asked < 0 ? prompts[first].length - 1 : asked);
  }

  // --- tables that are sorted by the column whose name is clicked

  function sortTable(table, head, direction) {
    const column = [...head.parentElement.children].indexOf(head);
    const key = (row) => row.children[column].dataset.value;
    const compare = (one, other) => Number(one) - Number(other) || String(one).localeCompare(String(other));
    const rows = [...table.tBodies[0].rows].sort((one, other) => direction * compare(key(one), key(other)));
    table.tBodies[0].append(...rows);
    table.querySelectorAll("[aria-sort]").forEach((each) => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
  }

  function startSorting(table) {
    const [column, order] = (chosen.get("sort") ?? "").split("-");
    table.querySelectorAll("th[data-sort]").forEach((head) => {
      const button = element("button", { type: "button", textContent: head.textContent });
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const isAscending = head.getAttribute("aria-sort") === "ascending";
        sortTable(table, head, isAscending ? -1 : 1);
        remember("sort", `${head.dataset.sort}-${isAscending ? "down" : "up"}`);
      });
      if (head.dataset.sort === column) sortTable(table, head, order === "down" ? -1 : 1);
    });
    shorten(table);
  }

  // Of a long table only the first rows are shown, in whatever order, until the reader asks for all.
  function shorten(table) {
    const more = table.parentElement.querySelector("[data-more]");
    const isShort = table.tBodies[0].rows.length > FEW_ROWS && !chosen.has("all");
    table.classList.toggle("short", isShort);
    more.hidden = !isShort;
    more.onclick = () => {
      remember("all", "1");
      shorten(table);
    };
  }

  // --- the map of layers: the text of a cell is shown below it, also where nothing hovers

  function startMap(section) {
    const readout = section.querySelector("[data-readout]");
    const show = (event) => {
      const cell = event.target.closest("td[title]");
      if (cell) readout.textContent = cell.title;
    };
    section.querySelector(".map")?.addEventListener("pointerover", show);
    section.querySelector(".map")?.addEventListener("click", show);
  }

  // --- the index, which follows the reader, and opens what is folded; the address keeps the reader's choices

  function openPart(event) {
    const link = event.target.closest("a[href^='#']");
    const part = link && document.getElementById(link.hash.slice(1));
    if (!part) return;
    event.preventDefault();
    const drawer = part.querySelector(":scope > .drawer");
    if (drawer) drawer.open = true;
    part.scrollIntoView();
    part.tabIndex = -1;
    part.focus({ preventScroll: true });
    const { showStep, sortBy } = link.dataset;
    if (showStep) part.querySelector(`.prompt:has([aria-current]) a[data-step="${showStep}"]`)?.click();
    const head = sortBy && part.querySelector(`th[data-sort="${sortBy}"]`);
    if (head) {
      sortTable(head.closest("table"), head, -1);
      remember("sort", `${sortBy}-down`);
    }
  }

  function showPlace() {
    const links = [...document.querySelectorAll(".index a[href^='#']")];
    const isAtEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 2;
    const above = links.filter((link) => document.getElementById(link.hash.slice(1)).getBoundingClientRect().top < 120);
    const current = (isAtEnd && scrollY > 0 ? links : above).at(-1);
    links.forEach((link) => link.removeAttribute("aria-current"));
    current?.setAttribute("aria-current", "true");
    const list = current?.closest("ol");
    if (list) list.scrollLeft = current.offsetLeft - list.offsetLeft - (list.clientWidth - current.offsetWidth) / 2;
  }

  // What a chart is about is closed again by a click elsewhere, or by Escape.
  function closeInfos(event) {
    document.querySelectorAll(".info[open]").forEach((info) => {
      if (event.key === "Escape" || (event.type === "click" && !info.contains(event.target))) info.open = false;
    });
  }

  function localTimes() {
    document.querySelectorAll("time").forEach((time) => {
      time.textContent = new Date(time.dateTime).toLocaleString();
    });
  }

  // Lengths and shades in %, by script: the policy of a page that is served allows no style in its text.
  function putSizes() {
    for (const name of ["share", "shade"]) {
      document.querySelectorAll(`[data-${name}]`).forEach((place) => {
        place.style.setProperty(`--${name}`, `${place.dataset[name]}%`);
      });
    }
  }

  // A page that is no longer written shows for ever that the run continues.
  function showSilence() {
    document.querySelectorAll("[data-silent-since]").forEach((note) => {
      note.hidden = Date.now() / 1000 - Number(note.dataset.silentSince) < SILENT_S;
    });
  }

  // Parts that are there already when the page is renewed are left as they are.
  function startOnce(selector, start) {
    document.querySelectorAll(selector).forEach((place) => {
      if (!started.has(place)) start(place);
      started.add(place);
    });
  }

  function startAll() {
    localTimes();
    putSizes();
    showSilence();
    drawAll();
    startOnce("section.previews", startPreviews);
    startOnce("table.sortable", startSorting);
    startOnce("section.layers", startMap);
    showPlace();
  }

  const started = new WeakSet();
  startTheme();
  startAll();
  document.addEventListener("renewed", startAll);
  addEventListener("resize", resize);
  addEventListener("scroll", showPlace, { passive: true });
  document.addEventListener("click", openPart);
  document.addEventListener("click", closeInfos);
  document.addEventListener("keydown", closeInfos);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  new MutationObserver(drawAll).observe(document.documentElement, { attributeFilter: ["data-theme"] });
})();
