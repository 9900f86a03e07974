"use strict";
/* Draws the timelines of the data block. One panel a timeline, two canvases a panel: the lower one holds what changes with
   the view (jobs, memory, messages), the upper one what changes with the pointer, so that hovering never redraws the jobs. */
(() => {
  // Okabe and Ito's colours, which stay apart for colour-blind readers; the kinds also carry letters.
  const KINDS = {
    F: { name: "forward", colour: [0, 114, 178] },
    B: { name: "backward, inputs", colour: [230, 159, 0] },
    W: { name: "backward, weights", colour: [0, 158, 115] },
    X: { name: "backward", colour: [213, 94, 0] },
    finalize: { name: "finalize", colour: [204, 121, 167] },
    update: { name: "update", colour: [86, 96, 110] },
    wait: { name: "wait", colour: null },
    reduce: { name: "sum over replicas", colour: [120, 94, 60] },
  };
  const OTHER = { name: "other", colour: [150, 150, 150] };
  const GUTTER = 92, RIGHT = 12, AXIS = 26, NARROWEST = 1e-7;
  const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';
  const byId = (id) => document.getElementById(id);

  const view = { from: 0, to: 1, shared: true, memory: true, messages: true };
  let panels = [], hover = null, followed = null, frame = 0;

  // ---- text -----------------------------------------------------------------------------------------------------------

  function digits(value, count = 3) {
    if (value === 0) return "0";
    const places = Math.max(0, count - 1 - Math.floor(Math.log10(Math.abs(value)) + 1e-12));
    return value.toFixed(Math.min(places, 12));
  }
  function scaleOf(value, unit) {
    if (unit !== "s") return [1, unit];
    const size = Math.abs(value);
    return size >= 1 ? [1, "s"] : size >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  }
  /* A time with four digits, or as many as it takes to tell times apart that lie `apart` from each other. */
  function timeText(value, unit, apart = Infinity) {
    if (value === 0) return "0";
    const [factor, name] = scaleOf(value, unit);
    const finer = apart > 0 && apart < Math.abs(value) ? Math.ceil(Math.log10(Math.abs(value) / apart)) : 0;
    return `${digits(value / factor, 4 + Math.min(finer, 8))} ${name}`;
  }
  function bytesText(value, unit) {
    const prefixes = ["", "k", "M", "G", "T"], plain = value, bytes = unit === "s" ? "B" : "";
    let i = 0;
    while (Math.abs(value) >= 999.5 && i < prefixes.length - 1) { value /= 1000; i++; }
    if (i) return `${digits(value)} ${prefixes[i]}${bytes}`;
    return bytes ? `${Math.round(plain)} B` : String(+plain.toPrecision(4));
  }
  const nameOf = ({ kind, chunk, microBatch }) => (microBatch >= 0 ? `${kind}${chunk}.${microBatch}` : chunk >= 0 ? `${kind} ${chunk}` : kind);
  const BESIDE = 0.25; // of a row's height: what runs beside the jobs lies at its foot
  const keyOf = (kind, chunk, microBatch) => `${kind}/${chunk}/${microBatch}`;

  // ---- data -----------------------------------------------------------------------------------------------------------

  /* For sorted rows: where to begin so that nothing that reaches past `time` is missed, though jobs may nest. */
  function firstReaching(row, time) {
    let low = 0, high = row.jobs.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row.reach[middle] < time) low = middle + 1; else high = middle;
    }
    return low;
  }

  /* Of the points at one time, the last one and, where it stands out, the highest: a value given up and taken again at once is no dip. */
  function settle(points) {
    const kept = [];
    for (let i = 0; i < points.length; ) {
      const [time] = points[i], before = kept.length ? kept[kept.length - 1][1] : 0;
      let highest = -Infinity, last = 0;
      for (; i < points.length && points[i][0] === time; i++) {
        last = points[i][1];
        highest = Math.max(highest, last);
      }
      if (highest > Math.max(before, last)) kept.push([time, highest]);
      kept.push([time, last]);
    }
    return kept;
  }

  function readTimeline(raw) {
    const rows = Array.from({ length: raw.ranks }, () => ({ jobs: [], beside: [], reach: [], chunks: [], memory: [], peak: 0 }));
    const timeline = { title: raw.title, unit: raw.unit, rows, flows: [], index: new Map(), end: 0, peak: 0, count: 0 };
    for (const [rank, kind, chunk, microBatch, start, end] of raw.spans) {
      const job = { rank, kind, chunk, microBatch, start, end, in: [], out: [] };
      (kind === "reduce" ? rows[rank].beside : rows[rank].jobs).push(job);
      timeline.end = Math.max(timeline.end, end);
      if (kind !== "wait") { timeline.index.set(keyOf(kind, chunk, microBatch), job); timeline.count++; }
    }
    raw.memory.forEach((points, rank) => {
      rows[rank].memory = settle(points);
      for (const [, bytes] of points) rows[rank].peak = Math.max(rows[rank].peak, bytes);
      timeline.peak = Math.max(timeline.peak, rows[rank].peak);
    });
    for (const row of rows) {
      row.jobs.sort((a, b) => a.start - b.start || b.end - a.end);
      let reach = -Infinity;
      row.reach = row.jobs.map((job) => (reach = Math.max(reach, job.end)));
      row.chunks = [...new Set(row.jobs.filter((job) => job.chunk >= 0).map((job) => job.chunk))].sort((a, b) => a - b);
    }
    for (const [direction, source, target, microBatch, sender, receiver, sent, arrived, bytes] of raw.flows) {
      const flow = { direction, source, target, microBatch, sender, receiver, sent, arrived, bytes };
      timeline.flows.push(flow);
      timeline.end = Math.max(timeline.end, arrived);
      for (const kind of direction === "F" ? ["F"] : ["B", "X"]) {
        const producer = timeline.index.get(keyOf(kind, source, microBatch));
        const consumer = timeline.index.get(keyOf(kind, target, microBatch));
        if (producer && producer.rank === sender) producer.out.push(flow);
        if (consumer && consumer.rank === receiver) consumer.in.push(flow);
      }
    }
    for (const row of rows) {
      for (const job of [...row.jobs, ...row.beside]) {
        const passes = row.chunks.length;
        job.shade = job.chunk < 0 || passes < 2 ? 0 : (0.6 * row.chunks.indexOf(job.chunk)) / (passes - 1);
      }
    }
    return timeline;
  }

  // ---- colours --------------------------------------------------------------------------------------------------------

  const inks = new Map();
  function ink(kind, shade) {
    const key = `${kind}/${shade.toFixed(3)}`;
    if (!inks.has(key)) {
      const base = (KINDS[kind] || OTHER).colour || [226, 230, 235];
      const [r, g, b] = base.map((c) => Math.round(c + (255 - c) * shade));
      // The perceived brightness decides between dark and light letters.
      inks.set(key, { fill: `rgb(${r},${g},${b})`, text: 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#1c2530" : "#ffffff" });
    }
    return inks.get(key);
  }
  function hatching(ctx) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const pen = tile.getContext("2d");
    pen.strokeStyle = "#c3cad2";
    pen.beginPath();
    for (const shift of [-6, 0, 6]) { pen.moveTo(shift, 6); pen.lineTo(shift + 6, 0); }
    pen.stroke();
    return ctx.createPattern(tile, "repeat");
  }

  // ---- layout ---------------------------------------------------------------------------------------------------------

  const sharesUnit = () => panels.every((p) => p.timeline.unit === panels[0].timeline.unit);
  const extentOf = (panel) =>
    (view.shared && sharesUnit() ? Math.max(...panels.map((p) => p.timeline.end)) : panel.timeline.end) || 1;
  const hasMemory = () => panels.some((p) => p.timeline.peak > 0);
  const highestPeak = (panel) => (sharesUnit() ? Math.max(...panels.map((p) => p.timeline.peak)) : panel.timeline.peak);

  function layOut() {
    const total = panels.reduce((sum, p) => sum + p.timeline.rows.length, 0);
    const size = total <= 16 ? [26, 26, 8] : total <= 64 ? [18, 16, 5] : [10, 8, 2];
    const memory = view.memory && hasMemory();
    for (const panel of panels) {
      const width = panel.plot.clientWidth, ratio = window.devicePixelRatio || 1;
      const step = size[0] + (memory ? size[1] + 1 : 0) + size[2];
      const height = AXIS + panel.timeline.rows.length * step + 2;
      Object.assign(panel, { width, height, ratio, step, jobHeight: size[0], memoryHeight: memory ? size[1] : 0 });
      for (const canvas of [panel.base, panel.top]) {
        canvas.width = Math.round(width * ratio);
        canvas.height = Math.round(height * ratio);
        canvas.style.height = `${height}px`;
      }
    }
  }
  const rowTop = (panel, rank) => AXIS + rank * panel.step;
  const plotWidth = (panel) => Math.max(1, panel.width - GUTTER - RIGHT);
  function xOf(panel, time) {
    return GUTTER + ((time / extentOf(panel) - view.from) / (view.to - view.from)) * plotWidth(panel);
  }
  function timeAt(panel, x) {
    return (view.from + ((x - GUTTER) / plotWidth(panel)) * (view.to - view.from)) * extentOf(panel);
  }
  function pen(canvas, panel) {
    const ctx = canvas.getContext("2d");
    ctx.setTransform(panel.ratio, 0, 0, panel.ratio, 0, 0);
    ctx.clearRect(0, 0, panel.width, panel.height);
    return ctx;
  }
  function clipToPlot(ctx, panel, top = 0) {
    ctx.save();
    ctx.beginPath();
    ctx.rect(GUTTER, top, panel.width - GUTTER, panel.height - top);
    ctx.clip();
  }

  // ---- the lower canvas -----------------------------------------------------------------------------------------------

  function drawAxis(ctx, panel) {
    const from = timeAt(panel, GUTTER), to = timeAt(panel, panel.width - RIGHT);
    const rough = ((to - from) / plotWidth(panel)) * 110;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((m) => m * power >= rough * 0.999);
    const [factor, unit] = scaleOf(Math.max(Math.abs(to), step), panel.timeline.unit);
    const places = Math.min(12, Math.max(0, -Math.floor(Math.log10(step / factor) + 1e-9)));
    ctx.font = `11px ${FONT}`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "center";
    const end = xOf(panel, panel.timeline.end);
    for (let i = Math.ceil(from / step - 1e-9); i * step <= to + step * 1e-9; i++) {
      const x = xOf(panel, i * step);
      ctx.fillStyle = "#e6eaee";
      ctx.fillRect(Math.round(x), AXIS - 6, 1, panel.height - AXIS + 6);
      if (x > panel.width - 30) continue;
      ctx.fillStyle = "#5c6876";
      ctx.fillText(i ? `${((i * step) / factor).toFixed(places)} ${unit}` : "0", Math.max(x, GUTTER + 4), 11);
    }
    return end;
  }

  function drawMemory(ctx, panel, row, top) {
    const highest = highestPeak(panel), bottom = top + panel.memoryHeight;
    if (!row.memory.length || !highest) return;
    const yOf = (bytes) => bottom - (bytes / highest) * (panel.memoryHeight - 2);
    // Points that fall on one pixel are drawn as the span between their lowest and highest.
    let low = 0, high = row.memory.length;
    const from = timeAt(panel, GUTTER), to = timeAt(panel, panel.width);
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row.memory[middle][0] < from) low = middle + 1; else high = middle;
    }
    let bytes = low ? row.memory[low - 1][1] : 0;
    const path = new Path2D();
    path.moveTo(GUTTER - 1, yOf(bytes));
    for (let i = low; i < row.memory.length && row.memory[i][0] <= to; i++) {
      const x = xOf(panel, row.memory[i][0]);
      path.lineTo(x, yOf(bytes));
      bytes = row.memory[i][1];
      path.lineTo(x, yOf(bytes));
    }
    const last = Math.min(panel.width, Math.max(GUTTER - 1, xOf(panel, panel.timeline.end)));
    path.lineTo(last, yOf(bytes));
    const area = new Path2D(path);
    area.lineTo(last, bottom);
    area.lineTo(GUTTER - 1, bottom);
    ctx.fillStyle = "rgba(92,104,118,0.16)";
    ctx.fill(area);
    ctx.strokeStyle = "#6b7785";
    ctx.lineWidth = 1;
    ctx.stroke(path);
  }

  /* Jobs narrower than a pixel: each column shows its share of time in each kind, stacked, and idle time as the blank above. */
  function drawShares(ctx, panel, row, top, first, to) {
    const columns = Math.ceil((panel.width - GUTTER) / 2), shares = new Map();
    let drawn = 0;
    for (let i = first; i < row.jobs.length && row.jobs[i].start <= to; i++) {
      const job = row.jobs[i];
      const left = Math.max(0, (xOf(panel, job.start) - GUTTER) / 2), right = Math.min(columns, (xOf(panel, job.end) - GUTTER) / 2);
      if (right < left) continue;
      drawn++;
      if (job.kind === "wait") continue;
      if (!shares.has(job.kind)) shares.set(job.kind, new Float64Array(columns + 1));
      const sums = shares.get(job.kind);
      for (let c = Math.floor(left); c < right; c++) sums[c] += Math.min(right, c + 1) - Math.max(left, c);
    }
    const heights = new Float64Array(columns + 1);
    ctx.globalAlpha = followed === null ? 1 : 0.15;
    for (const kind of [...Object.keys(KINDS), ...shares.keys()].filter((k, i, all) => shares.has(k) && all.indexOf(k) === i)) {
      const sums = shares.get(kind);
      ctx.fillStyle = ink(kind, 0).fill;
      for (let c = 0; c < columns; c++) {
        if (!sums[c]) continue;
        const height = Math.min(sums[c], 1 - heights[c]) * panel.jobHeight;
        ctx.fillRect(GUTTER + 2 * c, top + panel.jobHeight * (1 - heights[c]) - height, 2, height);
        heights[c] += sums[c];
      }
    }
    ctx.globalAlpha = 1;
    if (followed === null) return drawn;
    for (let i = first; i < row.jobs.length && row.jobs[i].start <= to; i++) {
      const job = row.jobs[i], left = xOf(panel, job.start);
      if (job.microBatch !== followed) continue;
      ctx.fillStyle = ink(job.kind, 0).fill;
      ctx.fillRect(left, top, Math.max(1.5, xOf(panel, job.end) - left), panel.jobHeight);
    }
    return drawn;
  }

  function drawJobs(ctx, panel, row, top) {
    const from = timeAt(panel, GUTTER), to = timeAt(panel, panel.width), height = panel.jobHeight;
    const first = firstReaching(row, from), many = first + Math.ceil(plotWidth(panel) / 2);
    if (many < row.jobs.length && row.jobs[many].start <= to) return drawShares(ctx, panel, row, top, first, to);
    const size = height >= 24 ? 11.5 : height >= 16 ? 10.5 : 0;
    let drawn = 0;
    ctx.font = `${size}px ${FONT}`;
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    for (let i = first; i < row.jobs.length && row.jobs[i].start <= to; i++) {
      const job = row.jobs[i];
      if (job.end < from) continue;
      const left = Math.max(xOf(panel, job.start), GUTTER - 2), right = Math.min(xOf(panel, job.end), panel.width + 2);
      const width = right - left, gap = width > 5 ? 1 : 0;
      drawn++;
      ctx.globalAlpha = followed !== null && job.microBatch !== followed ? 0.15 : 1;
      if (job.kind === "wait") {
        ctx.fillStyle = panel.hatch;
        ctx.fillRect(left, top, Math.max(width, 0.5), height);
        continue;
      }
      const colours = ink(job.kind, job.shade);
      ctx.fillStyle = colours.fill;
      ctx.fillRect(left, top, Math.max(width - gap, 0.7), height);
      if (!size) continue;
      const full = nameOf(job);
      const text = width > full.length * 0.62 * size + 6 ? full : job.microBatch >= 0 ? String(job.microBatch) : "";
      if (text && width > text.length * 0.62 * size + 3) {
        ctx.fillStyle = colours.text;
        ctx.fillText(text, (left + right - gap) / 2, top + height / 2 + 0.5);
      }
    }
    ctx.globalAlpha = 1;
    return drawn;
  }

  function drawBeside(ctx, panel, row, top) {
    ctx.globalAlpha = followed === null ? 1 : 0.15;
    for (const { kind, shade, start, end } of row.beside) {
      const left = Math.max(xOf(panel, start), GUTTER - 2), right = Math.min(xOf(panel, end), panel.width + 2);
      ctx.fillStyle = ink(kind, shade).fill;
      if (right > left) ctx.fillRect(left, top, Math.max(right - left - (right - left > 5 ? 1 : 0), 0.7), panel.jobHeight * BESIDE);
    }
    ctx.globalAlpha = 1;
  }

  function flowPoints(panel, flow) {
    const down = flow.receiver > flow.sender;
    const edge = (rank, away) => rowTop(panel, rank) + (away ? panel.jobHeight : 0);
    return [xOf(panel, flow.sent), edge(flow.sender, down), xOf(panel, flow.arrived), edge(flow.receiver, !down)];
  }

  function drawMessages(ctx, panel) {
    ctx.beginPath();
    for (const flow of panel.timeline.flows) {
      if (followed !== null && flow.microBatch !== followed) continue;
      const [x1, y1, x2, y2] = flowPoints(panel, flow);
      if (Math.max(x1, x2) < GUTTER || Math.min(x1, x2) > panel.width) continue;
      ctx.moveTo(x1, y1);
      ctx.lineTo(x2, y2);
    }
    ctx.strokeStyle = "rgba(28,37,48,0.45)";
    ctx.lineWidth = 0.8;
    ctx.stroke();
  }

  function drawBase(panel) {
    const ctx = pen(panel.base, panel), { timeline } = panel;
    clipToPlot(ctx, panel);
    const end = drawAxis(ctx, panel);
    let drawn = 0;
    timeline.rows.forEach((row, rank) => {
      const top = rowTop(panel, rank);
      ctx.fillStyle = "#f0f2f5";
      const left = Math.max(GUTTER, xOf(panel, 0)), right = Math.min(end, panel.width);
      ctx.fillRect(left, top, Math.max(0, right - left), panel.jobHeight);
      if (panel.memoryHeight) drawMemory(ctx, panel, row, top + panel.jobHeight + 1);
      drawn += drawJobs(ctx, panel, row, top);
      drawBeside(ctx, panel, row, top + panel.jobHeight * (1 - BESIDE));
    });
    if (view.messages) drawMessages(ctx, panel);
    ctx.fillStyle = "#1c2530";
    if (end <= panel.width) ctx.fillRect(Math.round(end), AXIS - 6, 1, panel.height - AXIS + 6);
    ctx.restore();

    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    timeline.rows.forEach((row, rank) => {
      const top = rowTop(panel, rank);
      if (panel.jobHeight < 16 && rank % 4) return;
      ctx.fillStyle = "#1c2530";
      ctx.font = `${panel.jobHeight >= 24 ? 600 : 500} ${panel.jobHeight >= 24 ? 12.5 : 11}px ${FONT}`;
      ctx.fillText(`rank ${rank}`, 0, top + panel.jobHeight / 2 + 0.5);
      if (panel.memoryHeight >= 16 && row.memory.length) {
        ctx.fillStyle = "#5c6876";
        ctx.font = `11px ${FONT}`;
        ctx.fillText(`peak ${bytesText(row.peak, timeline.unit)}`, 0, top + panel.jobHeight + 2 + panel.memoryHeight / 2);
      }
    });
    panel.base.dataset.drawn = String(drawn);
  }

  // ---- the upper canvas -----------------------------------------------------------------------------------------------

  function arrow(ctx, [x1, y1, x2, y2]) {
    const angle = Math.atan2(y2 - y1, x2 - x1);
    ctx.beginPath();
    ctx.moveTo(x1, y1);
    ctx.lineTo(x2, y2);
    for (const turn of [-0.45, 0.45]) {
      ctx.moveTo(x2, y2);
      ctx.lineTo(x2 - 8 * Math.cos(angle + turn), y2 - 8 * Math.sin(angle + turn));
    }
    ctx.stroke();
  }

  function outline(ctx, panel, job) {
    const left = xOf(panel, job.start), width = Math.max(2, xOf(panel, job.end) - left);
    ctx.strokeRect(left - 1, rowTop(panel, job.rank) - 1, width + 1, panel.jobHeight + 2);
  }

  function drawTop(panel) {
    const ctx = pen(panel.top, panel);
    if (!hover) return;
    clipToPlot(ctx, panel);
    ctx.fillStyle = "rgba(28,37,48,0.35)";
    const x = panel === hover.panel || extentOf(panel) === extentOf(hover.panel) ? xOf(panel, hover.time) : NaN;
    if (x >= GUTTER) ctx.fillRect(x, AXIS - 6, 1, panel.height);
    ctx.strokeStyle = "#1c2530";
    ctx.lineWidth = 2;
    const job = hover.job && (panel === hover.panel ? hover.job : twin(panel, hover.job));
    if (job) {
      outline(ctx, panel, job);
      ctx.lineWidth = 1.6;
      for (const flow of [...job.in, ...job.out]) arrow(ctx, flowPoints(panel, flow));
    }
    ctx.restore();
  }

  const twin = (panel, job) => (job.kind === "wait" ? undefined : panel.timeline.index.get(keyOf(job.kind, job.chunk, job.microBatch)));

  // ---- the tooltip ----------------------------------------------------------------------------------------------------

  function memoryAt(row, time) {
    let low = 0, high = row.memory.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row.memory[middle][0] <= time) low = middle + 1; else high = middle;
    }
    return low ? row.memory[low - 1][1] : 0;
  }

  function facts() {
    const { panel, job, rank, time } = hover, { unit, rows } = panel.timeline, lines = [];
    if (!job) {
      lines.push(["Time", timeText(time, unit, ((view.to - view.from) * extentOf(panel)) / 100)]);
    } else {
      if (job.chunk >= 0) lines.push(["Chunk", job.chunk]);
      if (job.microBatch >= 0) lines.push(["Micro-batch", job.microBatch]);
      const length = job.end - job.start;
      lines.push(["Start", timeText(job.start, unit, length)], ["End", timeText(job.end, unit, length)]);
      lines.push(["Duration", timeText(length, unit)]);
      for (const other of panels) {
        const same = other !== panel && other.timeline.unit === unit && twin(other, job);
        if (!same) continue;
        const theirs = same.end - same.start, more = (100 * (theirs - length)) / length;
        const change = length > 0 ? ` (${more >= 0 ? "+" : "−"}${Math.abs(more).toFixed(0)}%)` : "";
        lines.push([`Duration, ${other.timeline.title}`, timeText(theirs, unit) + change]);
      }
      for (const flow of job.in) {
        lines.push([`Received from rank ${flow.sender}`, `${bytesText(flow.bytes, unit)} at ${timeText(flow.arrived, unit, length)}`]);
      }
      for (const flow of job.out) {
        lines.push([`Sent to rank ${flow.receiver}`, `${bytesText(flow.bytes, unit)} in ${timeText(flow.arrived - flow.sent, unit)}`]);
      }
    }
    if (rows[rank].memory.length) {
      lines.push([job ? "Live bytes at its end" : "Live bytes", bytesText(memoryAt(rows[rank], job ? job.end : time), unit)]);
    }
    const title = job ? `${nameOf(job)} · ${(KINDS[job.kind] || OTHER).name} on rank ${rank}` : `rank ${rank}`;
    return [job && job.chunk < 0 ? `${job.kind} on rank ${rank}` : title, lines];
  }

  function showTip(x, y) {
    const tip = byId("tip");
    tip.hidden = !hover || hover.rank < 0;
    if (tip.hidden) return;
    const [title, lines] = facts();
    const heading = document.createElement("strong"), list = document.createElement("dl");
    heading.textContent = title;
    for (const [name, value] of lines) {
      list.append(Object.assign(document.createElement("dt"), { textContent: name }));
      list.append(Object.assign(document.createElement("dd"), { textContent: value }));
    }
    tip.replaceChildren(heading, list);
    const box = tip.getBoundingClientRect();
    tip.style.left = `${x + 16 + box.width > innerWidth ? Math.max(4, x - box.width - 12) : x + 16}px`;
    tip.style.top = `${y + 16 + box.height > innerHeight ? Math.max(4, y - box.height - 12) : y + 16}px`;
  }

  // ---- changing the view ----------------------------------------------------------------------------------------------

  function redraw() {
    if (frame) return;
    frame = requestAnimationFrame(() => {
      frame = 0;
      panels.forEach(drawBase);
      panels.forEach(drawTop);
      const first = panels[0], extent = extentOf(first), unit = first.timeline.unit;
      const whole = view.to - view.from > 0.9999;
      byId("range").textContent = whole
        ? "whole step"
        : !(view.shared && sharesUnit())
        ? `${((view.to - view.from) * 100).toPrecision(3)}% of the step`
        : [view.from, view.to].map((at) => timeText(at * extent, unit, (view.to - view.from) * extent)).join(" – ");
    });
  }
  function resize() { layOut(); redraw(); }
  function setView(from, width) {
    width = Math.min(1, Math.max(NARROWEST, width));
    view.from = Math.min(1 - width, Math.max(0, from));
    view.to = view.from + width;
    redraw();
  }
  function zoom(factor, at = 0.5) {
    const width = view.to - view.from, next = Math.min(1, Math.max(NARROWEST, width * factor));
    setView(view.from + at * (width - next), next);
  }
  const pan = (share) => setView(view.from + share * (view.to - view.from), view.to - view.from);

  function find(panel, x, y) {
    const rank = Math.floor((y - AXIS) / panel.step), row = panel.timeline.rows[rank];
    if (!row || x < GUTTER) return { panel, job: null, rank: -1, time: timeAt(panel, x) };
    const time = timeAt(panel, x), reach = timeAt(panel, x + 1.5) - time;
    let job = null;
    if (y - rowTop(panel, rank) <= panel.jobHeight) {
      for (let i = firstReaching(row, time - reach); i < row.jobs.length && row.jobs[i].start <= time + reach; i++) {
        if (row.jobs[i].end >= time - reach && (!job || row.jobs[i].start <= time)) job = row.jobs[i];
      }
      if (y - rowTop(panel, rank) > panel.jobHeight * (1 - BESIDE)) {
        job = row.beside.find((other) => other.start <= time + reach && other.end >= time - reach) || job;
      }
    }
    return { panel, job, rank, time };
  }

  function listen(panel) {
    const { plot } = panel;
    let grabbed = null;
    const place = (event) => { const box = plot.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    plot.addEventListener("wheel", (event) => {
      const [x] = place(event);
      if (x < GUTTER) return; // the page scrolls over the names of the ranks
      const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        pan(sideways / plotWidth(panel));
      } else if (event.deltaY < 0 || view.to - view.from < 1) {
        event.preventDefault();
        zoom(Math.exp(Math.max(-200, Math.min(200, event.deltaY)) * 0.0025), (x - GUTTER) / plotWidth(panel));
      }
    }, { passive: false });
    plot.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      plot.setPointerCapture(event.pointerId);
      grabbed = { x: event.clientX, from: view.from, moved: false };
    });
    plot.addEventListener("pointermove", (event) => {
      if (grabbed) {
        const distance = event.clientX - grabbed.x;
        grabbed.moved ||= Math.abs(distance) > 3;
        if (!grabbed.moved) return;
        plot.classList.add("moving");
        byId("tip").hidden = true;
        hover = null;
        setView(grabbed.from - (distance / plotWidth(panel)) * (view.to - view.from), view.to - view.from);
        return;
      }
      hover = find(panel, ...place(event));
      plot.classList.toggle("over", Boolean(hover.job && hover.job.microBatch >= 0));
      panels.forEach(drawTop);
      showTip(event.clientX, event.clientY);
    });
    const release = (event) => {
      if (grabbed && !grabbed.moved && event.type === "pointerup") {
        const { job } = find(panel, ...place(event));
        followed = job && job.microBatch >= 0 && job.microBatch !== followed ? job.microBatch : null;
        redraw();
      }
      grabbed = null;
      plot.classList.remove("moving");
    };
    plot.addEventListener("pointerup", release);
    plot.addEventListener("pointercancel", release);
    plot.addEventListener("pointerleave", () => { hover = null; byId("tip").hidden = true; panels.forEach(drawTop); });
    plot.addEventListener("keydown", (event) => {
      const keys = {
        ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7),
        0: () => setView(0, 1), Escape: () => { followed = null; redraw(); },
      };
      if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      keys[event.key]();
    });
  }

  // ---- the parts of the page ------------------------------------------------------------------------------------------

  function addPanel(timeline) {
    const section = document.createElement("section"), heading = document.createElement("h2");
    const plot = document.createElement("div"), about = document.createElement("span");
    const base = document.createElement("canvas"), top = document.createElement("canvas");
    section.className = "panel";
    plot.className = "plot";
    plot.tabIndex = 0;
    heading.textContent = timeline.title;
    about.textContent = `${timeText(timeline.end, timeline.unit)} · ${timeline.count.toLocaleString("en")} jobs · ${timeline.flows.length.toLocaleString("en")} messages`;
    heading.append(about);
    base.setAttribute("role", "img");
    base.setAttribute("aria-label", `${timeline.title}: ${timeline.rows.length} ranks, ${about.textContent}`);
    plot.append(base, top);
    section.append(heading, plot);
    byId("panels").append(section);
    const panel = { timeline, plot, base, top, hatch: hatching(base.getContext("2d")) };
    listen(panel);
    return panel;
  }

  function addLegend() {
    const present = new Set(panels.flatMap((p) => p.timeline.rows.flatMap((row) => [...row.jobs, ...row.beside].map((job) => job.kind))));
    const passes = Math.max(...panels.flatMap((p) => p.timeline.rows.map((row) => row.chunks.length)), 1);
    for (const kind of [...Object.keys(KINDS), ...[...present].filter((k) => !KINDS[k])].filter((k) => present.has(k))) {
      const swatch = document.createElement("canvas"), item = document.createElement("li"), ctx = swatch.getContext("2d");
      const shades = kind in KINDS && kind.length === 1 ? Math.min(passes, 4) : 1;
      [swatch.width, swatch.height] = [12 * shades + 4, 14];
      for (let i = 0; i < shades; i++) {
        ctx.fillStyle = kind === "wait" ? hatching(ctx) : ink(kind, shades > 1 ? (0.6 * i) / (shades - 1) : 0).fill;
        ctx.fillRect((i * swatch.width) / shades, 0, swatch.width / shades, 14);
      }
      const letter = kind.length === 1 ? `${kind} ` : "";
      item.append(swatch, letter + (KINDS[kind] ? KINDS[kind].name : kind));
      byId("legend").append(item);
    }
  }

  function start() {
    panels = JSON.parse(byId("data").textContent).map(readTimeline).map(addPanel);
    const messages = panels.reduce((sum, p) => sum + p.timeline.flows.length, 0);
    view.messages = byId("messages").checked = messages > 0 && messages <= 400;
    byId("messages").disabled = !messages;
    byId("memory").disabled = !hasMemory();
    byId("shared-control").hidden = panels.length < 2 || !sharesUnit();
    addLegend();
    for (const name of ["messages", "memory", "shared"]) {
      byId(name).addEventListener("change", (event) => { view[name] = event.target.checked; resize(); });
    }
    const presses = { "zoom-in": () => zoom(0.6), "zoom-out": () => zoom(1 / 0.6), "pan-left": () => pan(-0.3),
      "pan-right": () => pan(0.3), fit: () => setView(0, 1) };
    for (const [id, press] of Object.entries(presses)) byId(id).addEventListener("click", press);
    window.addEventListener("resize", resize);
    resize();
  }

  try {
    start();
  } catch (error) {
    byId("problem").textContent = `The chart could not be drawn: ${error.message}. The tables above are complete.`;
    byId("problem").hidden = false;
    throw error;
  }
})();
