// Brings the parts together: what is in view, and what keys, wheel and pointer do.

const LEAST = 2000; // ns in view

class Page {
  constructor() {
    this.timeline = readTimeline(byId("data").textContent);
    const waits = longestWaits(this.timeline);
    this.groups = groupsOf(waits);
    this.view = { begin: 0, end: this.timeline.length, scroll: 0, chosen: null, found: null };
    this.lanes = new Lanes(byId("lanes"), this.timeline, this.view);
    this.overview = byId("overview").getContext("2d");
    this.closedOnScreen = new Set();
    this.matches = [];
    this.match = -1;
    this.isDrawing = false;
    const choose = (wait) => this.choose(wait, true);
    showSummary(this.timeline);
    showVerdict(this.timeline, waits, this.groups, choose);
    showLegend(this.timeline);
    showPlan(this.timeline);
    this.shown = showWaits(this.groups, this.view, choose);
    for (const step of this.timeline.steps) {
      byId("step").append(make("option", { value: step.number }, `Step ${step.number} (${timeText(step.ended - step.began)})`));
    }
    byId("step").prepend(make("option", { value: "" }, "Steps"));
    byId("step").value = "";
    this.listen();
    this.beginView();
    this.resize();
  }

  /** The longest wait is chosen, and its step is shown: all of the steps would be too narrow to see it, if they are many. */
  beginView() {
    const wait = this.groups[0]?.wait ?? null;
    const step = wait && stepAt(wait.rank, wait.wait);
    if (step && this.timeline.steps.length > 3) this.showStep(step.number);
    if (wait) {
      this.open(wait);
      this.choose(wait, false);
    } else {
      showDetails(this.timeline, null, {});
    }
  }

  listen() {
    const lanes = byId("lanes");
    const click = (id, action) => byId(id).addEventListener("click", action);
    click("in", () => this.zoom(0.5));
    click("out", () => this.zoom(2));
    click("all", () => this.show(0, this.timeline.length));
    click("print", () => window.print());
    click("help", () => this.toggleHelp());
    byId("step").addEventListener("change", (event) => {
      if (event.target.value !== "") this.showStep(Number(event.target.value));
      event.target.value = "";
    });
    byId("search").addEventListener("input", (event) => this.search(event.target.value));
    byId("search").addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.nextMatch(event.shiftKey ? -1 : 1);
      if (event.key === "Escape") {
        event.target.value = "";
        this.search("");
        lanes.focus();
      }
    });
    document.addEventListener("keydown", (event) => this.key(event));
    byId("scroller").addEventListener("scroll", () => {
      this.view.scroll = byId("scroller").scrollTop;
      this.draw();
    });
    lanes.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.listenToPointer(lanes);
    this.listenToOverview(byId("overview"));
    new ResizeObserver(() => this.resize()).observe(byId("scroller"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.recolour());
    addEventListener("beforeprint", () => this.print(true));
    addEventListener("afterprint", () => this.print(false));
  }

  listenToPointer(canvas) {
    let from = null; // where a drag began
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      from = { x: event.offsetX, y: event.offsetY, begin: this.view.begin, end: this.view.end, scroll: this.view.scroll, isClick: true };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (from === null) {
        const at = this.lanes.at(event.offsetX, event.offsetY);
        const rect = canvas.getBoundingClientRect();
        const room = canvas.closest(".picture").getBoundingClientRect();
        showTip(at, event.clientX - room.left, event.clientY - room.top, this.timeline.kinds);
        canvas.style.cursor = at && (at.collective || event.offsetX < GUTTER) && rect.width > 0 ? "pointer" : "";
        return;
      }
      if (Math.abs(event.offsetX - from.x) + Math.abs(event.offsetY - from.y) > 4) from.isClick = false;
      if (from.isClick) return;
      showTip(null);
      canvas.classList.add("dragging");
      const moved = (from.x - event.offsetX) * (from.end - from.begin) / (this.lanes.width - GUTTER);
      byId("scroller").scrollTop = from.scroll + from.y - event.offsetY;
      this.show(from.begin + moved, from.end + moved);
    });
    canvas.addEventListener("pointerup", (event) => {
      if (from?.isClick) this.click(event);
      from = null;
      canvas.classList.remove("dragging");
    });
    canvas.addEventListener("pointerleave", () => showTip(null));
  }

  listenToOverview(canvas) {
    let grip = null; // how far the middle of the view lies from the pointer
    const time = (event) => (event.offsetX - GUTTER) * this.timeline.length / (canvas.clientWidth - GUTTER);
    const move = (event) => {
      const half = (this.view.end - this.view.begin) / 2;
      this.show(time(event) - grip - half, time(event) - grip + half);
    };
    canvas.addEventListener("pointerdown", (event) => {
      const middle = (this.view.begin + this.view.end) / 2;
      const isInside = time(event) >= this.view.begin && time(event) <= this.view.end;
      grip = isInside ? time(event) - middle : 0;
      canvas.setPointerCapture(event.pointerId);
      move(event);
    });
    canvas.addEventListener("pointermove", (event) => grip !== null && move(event));
    canvas.addEventListener("pointerup", () => { grip = null; });
  }

  click(event) {
    const at = this.lanes.at(event.offsetX, event.offsetY);
    if (at && event.offsetX < GUTTER) {
      this.toggle(at.row.rank);
    } else if (at?.collective) {
      this.choose(at.collective, false);
    } else {
      this.choose(null, false);
    }
  }

  wheel(event) {
    if (event.offsetX < GUTTER && !event.ctrlKey) return; // The ranks scroll.
    event.preventDefault();
    const pixels = event.deltaMode === 1 ? 16 : 1;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      this.pan((event.deltaX || event.deltaY) * pixels / (this.lanes.width - GUTTER));
    } else {
      this.zoom(Math.exp(Math.max(Math.min(event.deltaY * pixels, 200), -200) / 300), this.lanes.timeAt(event.offsetX));
    }
  }

  key(event) {
    const isTyping = event.target.matches("input, select, textarea");
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    const pans = { ArrowLeft: -0.15, ArrowRight: 0.15, PageUp: -0.9, PageDown: 0.9 };
    const actions = {
      "+": () => this.zoom(0.6), "=": () => this.zoom(0.6), "-": () => this.zoom(1 / 0.6), "_": () => this.zoom(1 / 0.6),
      "0": () => this.show(0, this.timeline.length), "n": () => this.nextWait(1), "p": () => this.nextWait(-1),
      "f": () => this.view.chosen && this.zoomTo(this.view.chosen), "/": () => byId("search").focus(), "?": () => this.toggleHelp(),
      "Escape": () => this.choose(null, false),
      "ArrowUp": () => { byId("scroller").scrollTop -= 60; }, "ArrowDown": () => { byId("scroller").scrollTop += 60; },
      "Home": () => this.pan(-1e9), "End": () => this.pan(1e9),
    };
    if (event.key in pans) this.pan(pans[event.key]);
    else if (event.key in actions) actions[event.key]();
    else return;
    event.preventDefault();
  }

  /** Shows a range of time, or what is nearest to it within the timeline. */
  show(begin, end) {
    const length = Math.min(Math.max(end - begin, LEAST), this.timeline.length);
    const middle = (begin + end) / 2;
    this.view.begin = Math.min(Math.max(middle - length / 2, 0), this.timeline.length - length);
    this.view.end = this.view.begin + length;
    showTip(null);
    this.draw();
  }

  zoom(factor, around = null) {
    const { begin, end, chosen } = this.view;
    // By keys, around what is chosen, where that is in view.
    const centre = around ?? (chosen && chosen.ended > begin && chosen.began < end ? (Math.max(chosen.wait, begin) + Math.min(chosen.ended, end)) / 2 : (begin + end) / 2);
    const length = Math.min(Math.max((end - begin) * factor, LEAST), this.timeline.length);
    const from = centre - (centre - begin) * length / (end - begin);
    this.show(from, from + length);
  }

  pan(part) {
    const length = this.view.end - this.view.begin;
    this.show(this.view.begin + part * length, this.view.end + part * length);
  }

  showStep(number) {
    const step = this.timeline.steps.find((one) => one.number === number);
    const margin = (step.ended - step.began) * 0.02;
    this.show(step.began - margin, step.ended + margin);
  }

  choose(collective, zooms) {
    this.view.chosen = collective;
    showDetails(this.timeline, collective, { zoom: (what) => this.zoomTo(what), choose: (what) => this.choose(what, true) });
    markChosen(this.shown, collective);
    if (collective && zooms) this.zoomTo(collective);
    this.draw();
  }

  zoomTo(collective) {
    const begin = collective.waited > 0 ? collective.wait : collective.began;
    const length = Math.max(collective.ended - begin, LEAST / 4);
    this.open(collective);
    this.show(begin - 0.7 * length, collective.ended + 0.7 * length);
    this.scrollTo(collective);
  }

  /** Opens the ranks that the collective concerns. */
  open(collective) {
    const late = this.timeline.byRank.get(collective.lateRank);
    for (const rank of [collective.rank, late]) if (rank && this.lanes.closed.delete(rank)) this.resize();
  }

  scrollTo(collective) {
    const scroller = byId("scroller");
    const late = this.timeline.byRank.get(collective.lateRank);
    const ranks = [collective.rank, late ?? collective.rank];
    const top = Math.min(...ranks.map((rank) => rank.top)) - RULER - 6;
    const bottom = Math.max(...ranks.map((rank) => rank.bottom)) + 6;
    const room = scroller.clientHeight;
    const wanted = bottom - top <= room ? [top, bottom] : [collective.rank.top - RULER - 6, collective.rank.bottom + 6];
    if (scroller.scrollTop > wanted[0]) scroller.scrollTop = wanted[0];
    if (scroller.scrollTop + room < wanted[1]) scroller.scrollTop = wanted[1] - room;
  }

  nextWait(by) {
    if (this.shown.length === 0) return;
    const { chosen } = this.view;
    const at = this.shown.findIndex(({ wait, others }) => wait === chosen || others.includes(chosen));
    const next = at < 0 ? 0 : Math.min(Math.max(at + by, 0), this.shown.length - 1);
    this.choose(this.shown[next].wait, true);
  }

  search(text) {
    const wanted = text.trim().toLowerCase();
    const { timeline, view } = this;
    view.found = wanted === "" ? null : new Set(timeline.names.flatMap((name, i) => (name.toLowerCase().includes(wanted) ? [i] : [])));
    const isFound = (collective) => view.found !== null && collective.names.some((name) => view.found.has(name));
    this.matches = timeline.ranks.flatMap((rank) => rank.collectives.filter(isFound)).sort((a, b) => a.began - b.began);
    this.match = -1;
    byId("found").textContent = view.found === null ? "" : String(this.matches.length);
    this.shown = showWaits(this.groups, view, (wait) => this.choose(wait, true));
    markChosen(this.shown, view.chosen);
    this.draw();
  }

  nextMatch(by) {
    if (this.matches.length === 0) return;
    this.match = this.match < 0 && by > 0 ? 0 : (this.match + by + this.matches.length) % this.matches.length;
    byId("found").textContent = `${this.match + 1}/${this.matches.length}`;
    this.choose(this.matches[this.match], true);
  }

  toggle(rank) {
    if (!this.lanes.closed.delete(rank)) this.lanes.closed.add(rank);
    this.resize();
  }

  toggleHelp() {
    const keys = byId("keys");
    keys.hidden = !keys.hidden;
    byId("help").setAttribute("aria-expanded", String(!keys.hidden));
  }

  resize() {
    const scroller = byId("scroller");
    const isPrinted = document.documentElement.classList.contains("printing");
    this.lanes.arrange(isPrinted ? 0 : scroller.clientHeight);
    byId("spacer").style.height = `${this.lanes.height}px`;
    const width = isPrinted ? 1040 : scroller.clientWidth;
    const height = isPrinted ? this.lanes.height : Math.max(scroller.clientHeight, 60);
    const ratio = isPrinted ? 2 : devicePixelRatio;
    this.lanes.resize(width, height, ratio);
    const canvas = this.overview.canvas;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(46 * ratio);
    this.overview.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.profile = null;
    this.drawNow();
  }

  recolour() {
    this.lanes.recolour();
    this.profile = null;
    this.drawNow();
  }

  /** On paper, the ranks that the chosen wait concerns are whole, and the others one lane each, if that is needed to fit a page. */
  print(begins) {
    const { closed } = this.lanes;
    if (begins) {
      this.closedOnScreen = new Set(closed);
      const { chosen } = this.view;
      if (this.timeline.ranks.length > 4) this.timeline.ranks.forEach((rank) => closed.add(rank));
      if (chosen) [chosen.rank, this.timeline.byRank.get(chosen.lateRank)].forEach((rank) => closed.delete(rank));
    } else {
      closed.clear();
      this.closedOnScreen.forEach((rank) => closed.add(rank));
    }
    document.documentElement.classList.toggle("printing", begins);
    this.view.scroll = begins ? 0 : byId("scroller").scrollTop;
    this.lanes.recolour();
    this.resize();
  }

  draw() {
    if (this.isDrawing) return;
    this.isDrawing = true;
    requestAnimationFrame(() => {
      this.isDrawing = false;
      this.drawNow();
    });
  }

  drawNow() {
    this.lanes.draw();
    this.drawOverview();
    showReasons(this.timeline, this.view);
    // For programs that read the page: the visible range, in ns.
    this.lanes.canvas.dataset.begin = String(Math.round(this.view.begin));
    this.lanes.canvas.dataset.end = String(Math.round(this.view.end));
  }

  /** How much of the time ranks waited, and why: columns of pixels, added up once. */
  profileOf(columns) {
    const { timeline } = this;
    const sums = REASONS.map(() => new Float64Array(columns));
    const each = timeline.length / columns;
    for (const rank of timeline.ranks) {
      for (const wait of rank.waits) {
        for (const [reason, begin, end] of sectionsOf(wait)) {
          for (let column = Math.max(Math.floor(begin / each), 0); column < columns && column * each < end; column++) {
            sums[reason][column] += Math.min(end, (column + 1) * each) - Math.max(begin, column * each);
          }
        }
      }
    }
    const whole = each * Math.max(timeline.ranks.length, 1);
    return sums.map((of) => of.map((ns) => Math.min(ns / whole, 1)));
  }

  drawOverview() {
    const context = this.overview;
    const { colours } = this.lanes;
    const width = this.lanes.width;
    const height = 46;
    const room = width - GUTTER;
    const x = (time) => GUTTER + time * room / this.timeline.length;
    this.profile ??= this.profileOf(Math.max(Math.floor(room), 1));
    context.fillStyle = colours.paper;
    context.fillRect(0, 0, width, height);
    this.timeline.steps.forEach((step, i) => {
      context.fillStyle = i % 2 === 0 ? colours.panel : colours.paper;
      context.fillRect(x(step.began), 0, x(step.ended) - x(step.began), height);
    });
    for (let column = 0; column < this.profile[0].length; column++) {
      let y = height - 2;
      for (let reason = 0; reason < REASONS.length; reason++) {
        const part = this.profile[reason][column] * (height - 8);
        if (part < 0.2) continue;
        context.fillStyle = colours.reasons[reason];
        context.fillRect(GUTTER + column, y - part, 1, part);
        y -= part;
      }
    }
    context.fillStyle = colours.faint;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillText("ranks waiting", 8, height / 2);
    const left = x(this.view.begin);
    const right = Math.max(x(this.view.end), left + 3);
    context.fillStyle = colours.ink;
    context.globalAlpha = 0.1;
    context.fillRect(GUTTER, 0, left - GUTTER, height);
    context.fillRect(right, 0, width - right, height);
    context.globalAlpha = 1;
    context.strokeStyle = colours.accent;
    context.lineWidth = 2;
    context.strokeRect(left + 1, 1, right - left - 2, height - 2);
  }
}

const page = new Page();
