// Draws the lanes of the ranks. What is shown is in `view`: a range of time, a selection, what was searched.

const GUTTER = 104; // for names, left of the lanes
const RULER = 26;
const LABEL = 11; // px, of text in lanes

/** Colours of the page's style, as they are now: light, dark, or for print. */
function readColours() {
  const style = getComputedStyle(document.documentElement);
  const colours = {};
  for (const name of ["paper", "panel", "ink", "faint", "line", "accent", "forward-a", "forward-b", "backward-a", "backward-b", "between", "gather", "reduce",
    "outer", "host", "chosen", "found"]) colours[name] = style.getPropertyValue(`--${name}`).trim();
  colours.dim = Number(style.getPropertyValue("--dim"));
  colours.kinds = KINDS.map((kind) => style.getPropertyValue(kind).trim());
  colours.reasons = REASONS.map((reason) => style.getPropertyValue(reason.colour).trim());
  return colours;
}

class Lanes {
  constructor(canvas, timeline, view) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.timeline = timeline;
    this.view = view;
    // So many ranks fit no screen: their lanes open on demand.
    this.closed = new Set(timeline.ranks.length > 16 ? timeline.ranks : []);
    this.widths = new Map();
    this.recolour();
    this.arrange();
  }

  recolour() {
    this.colours = readColours();
    this.hatches = this.colours.reasons.map((colour) => this.hatch(colour));
  }

  hatch(colour) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const context = tile.getContext("2d");
    context.fillStyle = colour;
    context.fillRect(0, 0, 8, 8);
    context.strokeStyle = "rgb(255 255 255 / 30%)";
    context.lineWidth = 2;
    for (const x of [-8, 0, 8]) {
      context.beginPath();
      context.moveTo(x, 8);
      context.lineTo(x + 8, 0);
      context.stroke();
    }
    return this.context.createPattern(tile, "repeat");
  }

  /** Places rows of all ranks one below the other. */
  arrange(room = 0) {
    this.stretch = 1;
    this.place();
    // Few ranks use the room that there is.
    this.stretch = Math.min(Math.max((room - RULER) / (this.height - RULER), 1), 1.7);
    if (this.stretch > 1) this.place();
  }

  place() {
    this.rows = [];
    let y = RULER + 4;
    for (const rank of this.timeline.ranks) {
      const top = y;
      const add = (kind, natural, more = {}) => {
        const height = Math.floor(natural * this.stretch);
        this.rows.push({ kind, rank, y, height, ...more });
        y += height + 3;
      };
      const isClosed = this.closed.has(rank);
      add("compute", isClosed ? 18 : 28);
      if (!isClosed) {
        LANES.forEach((_, lane) => {
          const tracks = this.timeline.lanes[lane];
          if (tracks > 0) add("lane", tracks === 1 ? 13 : tracks * 9, { lane, tracks });
        });
        if (rank.memory.length > 0) add("memory", 44);
      }
      rank.top = top;
      y += isClosed ? 3 : 9;
      rank.bottom = y - 5;
    }
    this.height = y + 4;
  }

  resize(width, height, ratio) {
    this.width = width;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.shown = height;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.widths.clear();
  }

  x(time) { return GUTTER + (time - this.view.begin) * (this.width - GUTTER) / (this.view.end - this.view.begin); }
  timeAt(x) { return this.view.begin + (x - GUTTER) * (this.view.end - this.view.begin) / (this.width - GUTTER); }

  draw() {
    const { context, colours, view } = this;
    context.fillStyle = colours.paper;
    context.fillRect(0, 0, this.width, this.shown);
    context.save();
    context.beginPath();
    context.rect(0, RULER, this.width, this.shown - RULER);
    context.clip();
    context.translate(0, -view.scroll);
    for (const rank of this.timeline.ranks) this.drawSteps(rank);
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, this.width - GUTTER, this.height);
    context.clip();
    for (const row of this.rows) {
      if (row.y + row.height < view.scroll || row.y > view.scroll + this.shown) continue;
      if (row.kind === "compute") this.drawCompute(row);
      else if (row.kind === "lane") this.drawLane(row);
      else this.drawMemory(row);
    }
    this.drawChosen();
    context.restore();
    this.drawNames();
    context.restore();
    this.drawRuler();
  }

  drawSteps(rank) {
    const { context, colours } = this;
    context.fillStyle = colours.line;
    context.fillRect(0, rank.bottom, this.width, 1);
    for (const step of rank.steps) {
      const x = this.x(step.began);
      if (x < GUTTER || x > this.width) continue;
      context.fillStyle = colours.faint;
      context.fillRect(Math.round(x), rank.top - 2, 1, rank.bottom - rank.top);
    }
  }

  isDim(names) { return this.view.found !== null && !names.some((name) => this.view.found.has(name)); }

  /** Calls paint(entry, x, width) for what is in view; entries that begin in the pixel of the one before are left out. */
  eachVisible(entries, paint) {
    const { begin, end } = this.view;
    let last = -1;
    for (let i = firstBehind(entries, begin); i < entries.length && entries[i].began < end; i++) {
      const left = Math.max(this.x(entries[i].began), GUTTER - 2);
      const right = Math.min(this.x(entries[i].ended), this.width + 2);
      if (right < last) continue;
      const width = Math.max(right - left, 1);
      last = Math.floor(left + width) + (right - left < 1 ? 0.5 : 0);
      paint(entries[i], left, width, i);
    }
  }

  drawCompute(row) {
    const { context, colours } = this;
    const { rank, y, height } = row;
    this.eachVisible(rank.compute, (span, x, width, i) => {
      context.globalAlpha = this.isDim([span.name]) ? colours.dim : 1;
      const side = i % 2 === 0 ? "a" : "b";
      context.fillStyle = span.pass === "between steps" ? colours.between : colours[`${span.pass || "forward"}-${side}`];
      context.fillRect(x, y, width, height);
      if (width > 26) this.label(span.unit || span.pass, x, y, width, height, colours.ink);
    });
    context.globalAlpha = 1;
    this.drawWaits(row);
  }

  drawWaits({ rank, y, height }) {
    const { context, colours, view } = this;
    const waits = rank.waits;
    const each = (view.end - view.begin) / (this.width - GUTTER);
    let pixel = -1;
    let longest = null; // of those within one pixel
    let sum = 0;
    const flush = () => {
      if (longest === null) return;
      // As strong as the share of the pixel's time that they take, so that many short ones do not look like one that is long.
      context.globalAlpha = Math.max(Math.min(sum / each, 1), 0.2) * (this.isDim(longest.names) ? colours.dim : 1);
      context.fillStyle = colours.reasons[mainReason(longest)];
      context.fillRect(pixel, y, 1, height);
      longest = null;
      sum = 0;
    };
    for (let i = firstBehind(waits, view.begin); i < waits.length && waits[i].wait < view.end; i++) {
      const wait = waits[i];
      const left = this.x(wait.wait);
      const width = this.x(wait.ended) - left;
      if (width < 2) {
        if (Math.floor(left) !== pixel) flush();
        pixel = Math.floor(left);
        sum += wait.waited;
        if (longest === null || wait.waited > longest.waited) longest = wait;
        continue;
      }
      flush();
      context.globalAlpha = this.isDim(wait.names) ? colours.dim : 1;
      for (const [reason, begin, end] of sectionsOf(wait)) {
        const from = Math.max(this.x(begin), GUTTER);
        context.fillStyle = this.hatches[reason];
        context.fillRect(from, y, Math.min(this.x(end), this.width) - from, height);
      }
      const reason = mainReason(wait);
      const short = reason === LATE ? "late" : REASONS[reason].name;
      const text = reason === LATE && wait.lateRank >= 0 ? `late: rank ${wait.lateRank}` : short;
      const from = Math.max(left, GUTTER);
      const room = Math.min(left + width, this.width) - from;
      const fitting = [`${text} \u00b7 ${timeText(wait.waited)}`, text, short].find((one) => this.textWidth(one, true) < room - 7);
      if (fitting) this.label(fitting, from, y, room, height, colours.paper, true);
    }
    flush();
    context.globalAlpha = 1;
  }

  drawLane({ rank, y, height, lane, tracks }) {
    const { context, colours } = this;
    const each = height / tracks;
    rank.tracks[lane].forEach((track, number) => {
      this.eachVisible(track, (collective, x, width) => {
        context.globalAlpha = this.isDim(collective.names) ? colours.dim : 1;
        context.fillStyle = colours[LANES[lane]];
        const top = y + number * each;
        context.fillRect(x, top, width, each - 1);
        if (collective.waited > 0 && width > 3) {
          const from = Math.max(this.x(collective.wait), GUTTER);
          context.fillStyle = colours.reasons[mainReason(collective)];
          context.fillRect(from, top + each - 3, Math.max(Math.min(this.x(collective.ended), this.width) - from, 1), 2);
        }
        if (each > 10 && width > 30) this.label(collective.unit || collective.operation, x, top, width, each - 2, colours.ink);
      });
    });
    context.globalAlpha = 1;
  }

  drawMemory({ rank, y, height }) {
    const { context, colours, view, timeline } = this;
    const level = (bytes) => y + height - (height - 4) * bytes / timeline.mostBytes;
    const memory = rank.memory;
    const first = Math.max(firstBehind(memory, view.begin, (moment) => moment.time) - 1, 0);
    const area = (colour, top) => {
      context.fillStyle = colour;
      let last = -1; // Between two pixels, the highest counts.
      let highest = 0;
      for (let i = first; i < memory.length && memory[i].time < view.end; i++) {
        const next = i + 1 < memory.length ? memory[i + 1].time : timeline.length;
        const left = Math.max(this.x(memory[i].time), GUTTER);
        const right = Math.min(this.x(next), this.width);
        highest = Math.max(highest, top(memory[i]));
        if (right < last + 1 && i + 1 < memory.length) continue;
        const from = last < 0 ? left : Math.min(left, last);
        const [a, b] = [Math.round(from), Math.round(Math.max(right, from + 1))]; // without seams
        context.fillRect(a, level(highest), b - a, y + height - level(highest));
        last = right;
        highest = 0;
      }
    };
    for (let top = STACK.length; top > 0; top--) {
      const below = STACK.slice(0, top);
      area(colours.kinds[STACK[top - 1]], (moment) => below.reduce((sum, kind) => sum + moment.held[kind], 0));
    }
    if (timeline.plan) this.drawPlannedPeak(level(timeline.plan.peak), y);
    let peak = null;
    for (const moment of rank.peaks) if (moment.time >= view.begin && moment.time <= view.end && moment.bytes > (peak?.bytes ?? 0)) peak = moment;
    if (peak === null) return;
    const x = this.x(peak.time);
    context.fillStyle = colours.ink;
    context.fillRect(x - 3, level(peak.bytes) - 1, 6, 2);
    const text = `peak ${bytesText(peak.bytes)}${peak.unit ? ` in ${peak.unit}` : ""}`;
    context.font = `${LABEL - 1}px system-ui, sans-serif`;
    const width = context.measureText(text).width;
    context.fillText(text, Math.max(GUTTER + 4, x - width - 6), y + 9);
  }

  drawPlannedPeak(height, top) {
    const { context, colours } = this;
    context.setLineDash([5, 3]);
    context.strokeStyle = colours.accent;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(GUTTER, height);
    context.lineTo(this.width, height);
    context.stroke();
    context.setLineDash([]);
    context.fillStyle = colours.ink;
    context.font = `${LABEL - 1}px system-ui, sans-serif`;
    context.textAlign = "right";
    context.fillText("planned peak", this.width - 4, Math.max(height + 7, top + 7));
    context.textAlign = "left";
  }

  /** What the selected wait was for: the time in which the late rank had not come, and its call. */
  drawChosen() {
    const { context, colours, view } = this;
    const chosen = view.chosen;
    if (chosen === null) return;
    const row = this.rows.find((one) => one.rank === chosen.rank && one.kind === "compute");
    const outline = (begin, end, { y, height }, colour, width) => {
      context.strokeStyle = colour;
      context.lineWidth = width;
      const left = Math.max(this.x(begin), GUTTER - 4);
      context.strokeRect(left, y - 1, Math.max(Math.min(this.x(end), this.width + 4) - left, 2), height + 2);
    };
    if (chosen.waited > 0) outline(chosen.wait, chosen.ended, row, colours.chosen, 2);
    const lane = this.rows.find((one) => one.rank === chosen.rank && one.lane === chosen.lane);
    if (lane) {
      const each = lane.height / lane.tracks;
      outline(chosen.began, chosen.ended, { y: lane.y + chosen.track * each + 1, height: each - 3 }, colours.chosen, 1.5);
    }
    if (chosen.lateRank < 0) return;
    const other = this.rows.find((one) => one.rank.rank === chosen.lateRank && one.kind === "compute");
    if (!other) return;
    const came = chosen.wait + chosen.reasons[LATE];
    const x = this.x(came);
    outline(chosen.wait, came, other, colours.reasons[LATE], 2);
    context.setLineDash([4, 3]);
    context.strokeStyle = colours.reasons[LATE];
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(x, row.y + row.height / 2);
    context.lineTo(x, other.y + other.height / 2);
    context.stroke();
    context.setLineDash([]);
    context.fillStyle = colours.reasons[LATE];
    context.beginPath();
    context.arc(x, other.y + other.height / 2, 4, 0, 7);
    context.fill();
  }

  drawNames() {
    const { context, colours, timeline } = this;
    context.fillStyle = colours.paper;
    context.fillRect(0, 0, GUTTER - 1, this.height);
    context.fillStyle = colours.line;
    context.fillRect(GUTTER - 1, 0, 1, this.height);
    context.textBaseline = "middle";
    for (const { kind, rank, y, height, lane } of this.rows) {
      const middle = y + height / 2;
      if (kind === "compute") {
        context.fillStyle = colours.ink;
        context.font = "600 12px system-ui, sans-serif";
        context.fillText(`${this.closed.has(rank) ? "\u25b8" : "\u25be"} rank ${rank.rank}`, 8, middle);
        continue;
      }
      context.fillStyle = colours.faint;
      context.font = `${LABEL}px system-ui, sans-serif`;
      context.fillText(kind === "memory" ? "memory" : LANES[lane], 22, kind === "memory" ? middle + 4 : middle);
      if (kind === "memory") {
        context.font = "9px system-ui, sans-serif";
        context.textAlign = "right";
        context.fillText(bytesText(timeline.mostBytes), GUTTER - 5, y + 5);
        context.textAlign = "left";
      }
    }
    context.fillStyle = colours.line;
    for (const rank of timeline.ranks) context.fillRect(0, rank.bottom, GUTTER, 1);
  }

  drawRuler() {
    const { context, colours, view } = this;
    context.fillStyle = colours.panel;
    context.fillRect(0, 0, this.width, RULER - 1);
    context.fillStyle = colours.line;
    context.fillRect(0, RULER - 1, this.width, 1);
    const most = Math.max(2, Math.floor((this.width - GUTTER) / 110));
    const raw = (view.end - view.begin) / most;
    const power = 10 ** Math.floor(Math.log10(raw));
    const tick = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= raw);
    context.font = `${LABEL}px system-ui, sans-serif`;
    context.textBaseline = "middle";
    for (let time = Math.ceil(view.begin / tick) * tick; time <= view.end; time += tick) {
      const x = this.x(time);
      context.fillStyle = colours.line;
      context.fillRect(x, 14, 1, RULER - 14);
      context.fillStyle = colours.faint;
      context.fillText(tickText(time, tick), x + 4, 18);
    }
    context.font = "600 10px system-ui, sans-serif";
    let free = GUTTER;
    for (const [i, step] of this.timeline.steps.entries()) {
      const x = Math.max(this.x(step.began), GUTTER);
      const end = this.x(Math.min(step.ended, this.timeline.steps[i + 1]?.began ?? step.ended)); // Other ranks may be in the next one already.
      if (end < GUTTER || x > this.width || x < free) continue;
      const text = `step ${step.number}${step.isWhole ? "" : " (not whole)"}`;
      if (end - x < context.measureText(text).width) continue;
      context.fillStyle = colours.ink;
      context.fillText(text, x + 4, 7);
      free = x + context.measureText(text).width + 10;
    }
    context.fillStyle = colours.panel;
    context.fillRect(0, 0, GUTTER, RULER - 1);
  }

  textWidth(text, isStrong) {
    const key = isStrong ? `!${text}` : text;
    let width = this.widths.get(key);
    if (width === undefined) {
      this.context.font = `${isStrong ? "600 " : ""}${LABEL}px system-ui, sans-serif`;
      this.widths.set(key, width = this.context.measureText(text).width);
    }
    return width;
  }

  /** A text that is cut to its place. */
  label(text, x, y, width, height, colour, isStrong = false) {
    const { context } = this;
    const left = Math.max(x, GUTTER) + 4;
    const room = x + width - left - 3;
    if (room < 16) return;
    const needs = this.textWidth(text, isStrong);
    context.font = `${isStrong ? "600 " : ""}${LABEL}px system-ui, sans-serif`;
    if (needs > room) {
      const fits = Math.floor(text.length * room / needs) - 1;
      if (fits < 6) return;
      // The end of a unit's name says more than its beginning.
      text = `\u2026${text.slice(-fits)}`;
    }
    context.fillStyle = colour;
    context.textBaseline = "middle";
    context.fillText(text, left, y + height / 2 + 0.5);
  }

  /** What lies at a point of the canvas: {row, rank} with a collective, a wait or a span. */
  at(x, y) {
    if (y < RULER) return null;
    const row = this.rows.find((one) => y + this.view.scroll >= one.y - 1 && y + this.view.scroll <= one.y + one.height + 1);
    if (!row || x < GUTTER) return row ? { row } : null;
    const time = this.timeAt(x);
    const near = 3 * (this.view.end - this.view.begin) / (this.width - GUTTER);
    const nearest = (entries, begin) => {
      const i = firstBehind(entries, time - near);
      // The longest of those within reach: short ones can be reached by zooming.
      let best = null;
      for (let j = i; j < entries.length && begin(entries[j]) <= time + near; j++) {
        if (best === null || entries[j].ended - begin(entries[j]) > best.ended - begin(best)) best = entries[j];
      }
      return best;
    };
    if (row.kind === "compute") {
      const wait = nearest(row.rank.waits, (one) => one.wait);
      if (wait) return { row, collective: wait };
      const i = firstBehind(row.rank.compute, time);
      return { row, span: row.rank.compute[i]?.began <= time ? row.rank.compute[i] : null };
    }
    if (row.kind === "lane") {
      const number = Math.min(Math.floor((y + this.view.scroll - row.y) * row.tracks / row.height), row.tracks - 1);
      return { row, collective: nearest(row.rank.tracks[row.lane][Math.max(number, 0)] ?? [], (one) => one.began) };
    }
    const i = firstBehind(row.rank.memory, time, (moment) => moment.time) - 1;
    return { row, memory: row.rank.memory[i] ?? null };
  }
}
