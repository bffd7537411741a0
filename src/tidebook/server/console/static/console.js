// What needs a script: keys, themes, charts, live views, selections.
"use strict";
(() => {
  const $ = (selector, from = document) => from.querySelector(selector);
  const $$ = (selector, from = document) => [...from.querySelectorAll(selector)];
  const root = document.documentElement;

  // ---- theme
  const themes = ["auto", "light", "dark"];
  function setTheme(theme) {
    root.dataset.theme = theme;
    document.cookie = `tidebook_theme=${theme}; path=/; max-age=31536000; samesite=strict`;
    nameTheme();
    drawCharts();
  }
  function nameTheme() {
    for (const button of $$("[data-theme-toggle]")) button.textContent = `Theme: ${root.dataset.theme}`;
  }
  const nextTheme = () => setTheme(themes[(themes.indexOf(root.dataset.theme) + 1) % themes.length]);

  // ---- keys
  let afterG = false;
  let row = -1;
  function moveRow(by) {
    const rows = $$(".rows tbody tr, ul.rows > li");
    if (!rows.length) return;
    row = Math.min(rows.length - 1, Math.max(0, row + by));
    const target = $("a, button, summary", rows[row]) || rows[row];
    target.focus();
    rows[row].scrollIntoView({ block: "nearest" });
  }
  const click = (selector) => { const found = $(selector); if (found) found.click(); };
  const characterKeysAreOff = () => localStorage.getItem("tidebook_keys") === "off";

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key.length === 1 && characterKeysAreOff()) return;  // speech input would trigger them by mistake
    const typing = event.target.closest("input, textarea, select, [contenteditable]");
    if (typing) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const dialog = $("#keys");
    if (dialog && dialog.open && event.key !== "?") return;
    if (afterG) {
      afterG = false;
      const link = $(`nav a[data-key="${CSS.escape(event.key)}"]`);
      if (link) { event.preventDefault(); link.click(); }
      return;
    }
    switch (event.key) {
      case "?": event.preventDefault(); toggleHelp(); break;
      case "g": afterG = true; setTimeout(() => { afterG = false; }, 1500); break;
      case "/": { const box = $("[data-search]"); if (box) { event.preventDefault(); box.focus(); box.select(); } break; }
      case "j": moveRow(1); break;
      case "k": moveRow(-1); break;
      case "n": click("a[rel=next]"); break;
      case "p": click("a[rel=prev]"); break;
      case "x": {
        const current = $$(".rows tbody tr")[row];
        const box = current && $("[data-select]", current);
        if (box) box.click();
        break;
      }
      case "t": nextTheme(); break;
      case " ": {
        const pause = $("[data-pause]");
        if (pause && !event.target.closest("button, summary, a")) { event.preventDefault(); pause.click(); }
        break;
      }
    }
  }
  function toggleHelp() {
    const dialog = $("#keys");
    if (dialog) dialog.open ? dialog.close() : dialog.showModal();
  }

  // ---- charts
  const groups = {
    rates: [["pipeline_records_total", "replicated", true], ["outbox_sent_total", "relayed", true], ["queue_done_total", "jobs", true]],
    lag: [["pipeline_lag_records", "records", false]],
    backlog: [["outbox_waiting", "outbox", false], ["outbox_parked", "parked", false]],
  };
  let plots = [];
  let history = null;
  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  function series(names, samples, name, isRate) {
    const index = names.indexOf(name);
    const values = samples.map((sample) => (index < 0 ? null : sample.values[index]));
    if (!isRate) return values;
    return values.map((value, i) => {
      const last = i ? values[i - 1] : null;
      if (value === null || last === null) return null;
      const seconds = (samples[i].at_ms - samples[i - 1].at_ms) / 1000;
      return value < last || seconds <= 0 || seconds > 60 ? null : (value - last) / seconds;
    });
  }
  // Without a pointer on the chart, its legend has the latest value.
  function shownValue(plot, value, series, index) {
    const shown = index === null ? plot.data[series].findLast((each) => each !== null) : value;
    return shown == null ? "–" : shown.toLocaleString("en", { maximumFractionDigits: 1 });
  }
  const clock = (time) => new Date(time * 1000).toISOString().slice(11, 19);
  function drawCharts() {
    const box = $("[data-history]");
    if (!box || !history || !window.uPlot) return;
    for (const plot of plots) plot.destroy();
    plots = [];
    const colors = [color("--line-1"), color("--line-2"), color("--line-3")];
    const grid = { stroke: color("--line"), width: 1 };
    for (const target of $$("[data-chart]", box)) {
      const group = groups[target.dataset.chart];
      target.textContent = "";
      if (history.samples.length < 2) {
        target.textContent = "A point is added every ten seconds: wait for the first ones.";
        target.classList.add("muted");
        continue;
      }
      target.classList.remove("muted");
      const data = [history.samples.map((sample) => sample.at_ms / 1000)];
      for (const [name, , isRate] of group) data.push(series(history.names, history.samples, name, isRate));
      const axis = { stroke: color("--muted"), grid, ticks: grid, font: "12px system-ui" };
      plots.push(new uPlot({
        width: target.clientWidth,
        height: 160,
        cursor: { y: false },
        legend: { live: true },
        scales: { y: { range: (u, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
        // A tick after the last point would have its label cut off by the edge.
        axes: [{ ...axis, space: 70, values: (u, times) => times.map((time) => (time > u.scales.x.max ? "" : clock(time))) }, { ...axis, size: 56 }],
        series: [{ label: "UTC" }, ...group.map(([, label], i) => ({ label, value: shownValue, stroke: colors[i], width: 1.5, points: { show: false } }))],
      }, data, target));
    }
  }
  async function loadCharts() {
    const box = $("[data-history]");
    if (!box || document.hidden) return;
    const since = Date.now() - Number(box.dataset.hours) * 3600e3;
    const answer = await fetch(`${box.dataset.history}?since_ms=${Math.round(since)}`).catch(() => null);
    if (answer && answer.ok) { history = await answer.json(); drawCharts(); }
  }

  // ---- tables: on a phone, each value is shown with the name of its column
  function labelCells(from) {
    for (const row of $$("tbody tr", from)) {
      const heads = $$("thead th", row.closest("table"));
      for (const [i, cell] of [...row.children].entries()) {
        const isNamed = cell.tagName === "TD" || cell.classList.contains("num");
        if (!isNamed || !heads[i] || cell.colSpan > 1 || $(".sr", heads[i])) continue;
        cell.dataset.label = heads[i].textContent.replace(/[↑↓]/, "").trim();
      }
    }
  }
  document.addEventListener("htmx:afterSettle", () => labelCells(document));

  // ---- live views: while one is paused, rows wait, the oldest are dropped
  const ROWS_MAX = 500;
  let paused = false;
  let waiting = [];
  let dropped = 0;
  const status = (text) => { const found = $("[data-live-status]"); if (found) found.textContent = text; };
  document.addEventListener("htmx:sseBeforeMessage", (event) => {
    if (!paused) return;
    event.preventDefault();
    waiting.push(event.detail.data);
    if (waiting.length > ROWS_MAX) { waiting.shift(); dropped += 1; }
    status(`Paused: ${waiting.length} new${dropped ? `, ${dropped} dropped` : ""}.`);
  });
  document.addEventListener("htmx:sseMessage", () => {
    const rows = $("[data-live]");
    while (rows && rows.children.length > ROWS_MAX) rows.lastElementChild.remove();
    if (rows && rows.firstElementChild) labelCells(rows.parentElement);
  });
  document.addEventListener("htmx:sseOpen", () => { if (!paused) status("Connected: new rows appear at the top."); });
  document.addEventListener("htmx:sseError", () => status("Disconnected: reconnecting."));
  function togglePause(button) {
    paused = !paused;
    button.setAttribute("aria-pressed", String(paused));
    button.textContent = paused ? "Resume" : "Pause";
    if (paused) { status("Paused."); return; }
    const rows = $("[data-live]");
    for (const data of waiting) htmx.swap(rows, data, { swapStyle: "afterbegin" });
    status(dropped ? `${dropped} rows were dropped while it was paused.` : "Connected: new rows appear at the top.");
    waiting = [];
    dropped = 0;
  }

  // ---- a page says which part of it could not be updated, instead of looking up to date
  function failureOf(xhr) {
    if (!xhr || !xhr.status) return "The server does not answer";
    const detail = $("main .clip-long", new DOMParser().parseFromString(xhr.responseText, "text/html"));
    return `The server answers ${xhr.status}${detail ? `: ${detail.textContent}` : ""}`;
  }
  function onFailure(event) {
    const search = event.detail.elt.closest(".more");
    const place = search ? $("[data-failure]", search) : $("[data-stale]");
    if (!place || !place.hidden) return;
    place.textContent = `${failureOf(event.detail.xhr)}. ${search ? "The search has stopped." : `This page is as of ${clock(Date.now() / 1000)} UTC.`}`;
    place.hidden = false;
    if (search) for (const button of $$("[data-stop]", search)) button.remove();
  }
  for (const name of ["htmx:sendError", "htmx:responseError", "htmx:timeout"]) document.addEventListener(name, onFailure);
  document.addEventListener("htmx:afterRequest", (event) => { if (event.detail.successful) $("[data-stale]").hidden = true; });

  // ---- selections
  const selectedPlaces = () => $$("[data-select]:checked").map((box) => box.value);
  function showSelection() {
    const places = selectedPlaces();
    for (const form of $$("[data-selection]")) {
      form.hidden = !places.length;
      form.elements.places.value = places.join(",");
      form.elements.back.value = location.pathname + location.search;
      $("[data-count]", form).textContent = places.length;
    }
  }
  document.addEventListener("change", (event) => {
    const all = event.target.closest("[data-select-all]");
    if (all) for (const box of $$("[data-select]")) box.checked = all.checked;
    if (!all && !event.target.closest("[data-select]")) return;
    const address = new URL(location.href);
    const places = selectedPlaces();
    if (places.length) address.searchParams.set("selected", places.join(","));
    else address.searchParams.delete("selected");
    window.history.replaceState(window.history.state, "", address);
    showSelection();
  });

  document.addEventListener("keydown", onKey);
  const characterKeys = $("[data-character-keys]");
  if (characterKeys) {
    characterKeys.checked = !characterKeysAreOff();
    characterKeys.addEventListener("change", () => {
      localStorage.setItem("tidebook_keys", characterKeys.checked ? "on" : "off");
    });
  }
  document.addEventListener("click", (event) => {
    if (event.target.closest("[data-theme-toggle]")) nextTheme();
    if (event.target.closest("[data-help]")) toggleHelp();
    const pause = event.target.closest("[data-pause]");
    if (pause) togglePause(pause);
    const stop = event.target.closest("[data-stop]");
    if (stop) {
      const row = stop.closest("[hx-get]");
      row.removeAttribute("hx-get");
      htmx.trigger(row, "htmx:abort");
      stop.remove();
    }
    const menu = event.target.closest("[data-menu]");
    if (menu) {
      const open = menu.getAttribute("aria-expanded") !== "true";
      menu.setAttribute("aria-expanded", String(open));
      $(".side").classList.toggle("open", open);
    }
  });
  nameTheme();
  labelCells(document);
  showSelection();
  loadCharts();
  if ($("[data-history]")) {
    setInterval(loadCharts, 10000);
    addEventListener("resize", drawCharts);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
  }
  root.dataset.ready = "true";
})();
