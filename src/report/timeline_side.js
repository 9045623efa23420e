// What stands beside the lanes: the longest wait at the top, what is chosen, reasons, the list of waits.

const LISTED = 100;

/** An element with attributes, and children that are elements or texts: no text becomes HTML. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") for (const [property, of] of Object.entries(value)) element.style.setProperty(property, of);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const byId = (id) => document.getElementById(id);
const reasonStyle = (reason) => ({ "--reason": `var(${REASONS[reason].colour})` });
const colourOf = (colour) => ({ "--of": `var(${colour})` });

function stepAt(rank, time) {
  return rank.steps.find((step) => time >= step.began && time < step.ended) ?? null;
}

function placeText(wait) {
  const step = stepAt(wait.rank, wait.wait);
  return `${wait.inBackward ? "backward" : "forward"}${step ? `, step ${step.number}` : ""}`;
}

function showSummary(timeline) {
  const steps = timeline.steps;
  const hosts = new Set(timeline.ranks.map((rank) => rank.host)).size;
  const parts = [
    `${timeline.ranks.length} rank${timeline.ranks.length === 1 ? "" : "s"}${hosts > 1 ? ` on ${hosts} hosts` : ""}`,
    steps.length === 0 ? "no steps" : steps.length === 1 ? `step ${steps[0].number}` : `steps ${steps[0].number} to ${steps[steps.length - 1].number}`,
    timeText(timeline.length),
  ];
  if (timeline.missing.length > 0) parts.push(`no file of rank${timeline.missing.length > 1 ? "s" : ""} ${timeline.missing.slice(0, 9).join(", ")}`);
  const inexact = timeline.ranks.filter((rank) => rank.clockWithin !== 0);
  if (inexact.some((rank) => rank.clockWithin < 0)) parts.push("clocks as the hosts set them");
  else if (inexact.length > 0) parts.push(`clocks agree within ${timeText(Math.max(...inexact.map((rank) => rank.clockWithin)))}`);
  byId("title").textContent = timeline.title;
  document.title = `${timeline.title} \u2013 timeline`;
  byId("summary").textContent = parts.join(" \u00b7 ");
}

function showVerdict(timeline, waits, groups, choose) {
  const place = byId("verdict");
  if (timeline.why !== null) place.before(make("p", { id: "first-cause" }, timeline.why.text));
  if (groups.length === 0) {
    place.append(make("div", { class: "why" }, make("p", {}, "No rank waited for a collective in this time.")));
    return;
  }
  const { wait, others } = groups[0];
  const { reason, head, rest } = because(wait);
  const total = waits.reduce((sum, one) => sum + one.waited, 0);
  const alike = waits.reduce((sum, one) => sum + one.reasons[reason], 0);
  const steps = timeline.ranks.reduce((sum, rank) => sum + rank.steps.reduce((of, step) => of + step.ended - step.began, 0), 0);
  place.style.setProperty("--reason", `var(${REASONS[reason].colour})`);
  place.append(
    make("div", { class: "much" }, timeText(wait.waited)),
    make("div", { class: "why" },
      make("p", {}, `Rank ${wait.rank.rank}${others.length > 0 ? ` and ${others.length} other${others.length > 1 ? "s" : ""}` : ""} waited for the ${collectiveText(wait)} (${placeText(wait)}) because `, make("strong", {}, head), `${rest}.`),
      make("p", {}, `The longest exposed wait${wait.state === "" ? "" : " that did not end"}. Waits take ${percent(total, steps || total)} of the ranks' time; ${percent(alike, total)} of that has the reason \u201c${
        REASONS[reason].name}\u201d.`)),
    make("button", { type: "button", id: "show-longest", onclick: () => choose(wait) }, "Show it"));
}

function percent(part, whole) {
  const share = 100 * part / Math.max(whole, 1);
  return `${share.toFixed(share < 10 ? 1 : 0)} %`;
}

function bar(reasons) {
  return make("div", { class: "bar", "aria-hidden": "true" }, ...reasons.map((ns, reason) =>
    ns > 0 ? make("i", { style: { ...colourOf(REASONS[reason].colour), "flex-grow": String(ns) } }) : null));
}

function definitions(pairs) {
  return make("dl", {}, ...pairs.filter((pair) => pair !== null).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, String(value))]));
}

/** What is chosen: a collective, with its wait if there was one. */
function showDetails(timeline, chosen, actions) {
  const place = byId("details");
  if (chosen === null) {
    place.replaceChildren(make("p", { class: "none" }, "Click a wait, or one of the list; keys n and p go through it."));
    return;
  }
  const hasWait = chosen.isWait;
  const why = hasWait ? because(chosen) : null;
  const collective = make("span", {}, collectiveText(chosen));
  const late = chosen.lateRank >= 0 ? callOn(timeline, chosen.lateRank, chosen) : undefined;
  const step = stepAt(chosen.rank, hasWait ? chosen.wait : chosen.began);
  place.replaceChildren(
    hasWait
      ? make("h3", { style: reasonStyle(why.reason) }, make("span", { class: "much" }, timeText(chosen.waited)), ` rank ${chosen.rank.rank}: `, collective)
      : make("h3", {}, `Rank ${chosen.rank.rank}: `, collective),
    hasWait
      ? make("p", { class: "because", style: reasonStyle(why.reason) }, "Because ", make("b", {}, why.head), `${why.rest}.`)
      : make("p", { class: "because" }, "Nobody waited for it: the computation hid it."),
    hasWait ? bar(chosen.reasons) : "",
    hasWait ? make("p", { class: "parts" }, REASONS.flatMap((reason, i) =>
      (chosen.reasons[i] > 0 ? [`${reason.name} ${timeText(chosen.reasons[i])}`] : [])).join(" \u00b7 ")) : "",
    definitions([
      ["unit", chosen.unit || "none"],
      ["collective", `${chosen.operation}, number ${chosen.number} of ${rowText(chosen.row)}`],
      ["bytes", chosen.bytes > 0 ? `${bytesText(chosen.bytes)} (${chosen.bytes.toLocaleString("en")})` : "not known"],
      step ? ["step", `${step.number}, ${hasWait ? (chosen.inBackward ? "backward" : "forward") : timeText(step.ended - step.began)}`] : null,
      ["called", (hasWait ? `${timeText(chosen.wait - chosen.began)} before the wait` : `${timeText(chosen.ended - chosen.began)} before its end`)
        + (late ? `; by rank ${chosen.lateRank} ${timeText(late.began - chosen.began)} later` : "")],
      chosen.state ? ["state", chosen.state] : null,
    ]),
    make("div", { class: "actions" },
      make("button", { type: "button", onclick: () => actions.zoom(chosen) }, "Zoom to it"),
      late ? make("button", { type: "button", onclick: () => actions.choose(late) }, `What rank ${chosen.lateRank} called`) : ""));
}

/** Sums over what is in view, per rank. */
function showReasons(timeline, view) {
  const sums = REASONS.map(() => 0);
  let computing = 0;
  for (const rank of timeline.ranks) {
    const waits = rank.waits;
    for (let i = firstBehind(waits, view.begin); i < waits.length && waits[i].wait < view.end; i++) {
      for (const [reason, begin, end] of sectionsOf(waits[i])) sums[reason] += Math.max(Math.min(end, view.end) - Math.max(begin, view.begin), 0);
    }
    computing += Math.max(Math.min(timeline.length, view.end) - Math.max(0, view.begin), 0);
  }
  const ranks = Math.max(timeline.ranks.length, 1);
  const total = sums.reduce((sum, ns) => sum + ns, 0);
  const shares = sums.map((ns, reason) => (ns === 0 ? null : make("span", { class: "share", title: REASONS[reason].help },
    make("i", { style: colourOf(REASONS[reason].colour) }), `${REASONS[reason].name} ${timeText(ns / ranks)} `, make("em", {}, percent(ns, computing)))));
  byId("reasons").replaceChildren(
    make("span", { class: "total" }, `Waits shown, per rank: ${timeText(total / ranks)}, ${percent(total, computing)}`),
    ...shares.filter((share) => share !== null), bar(sums));
}

/** The list of waits; of those with a name that was searched, if there was a search. */
function showWaits(groups, view, choose) {
  const shown = (view.found === null ? groups : groups.filter(({ wait }) => wait.names.some((name) => view.found.has(name)))).slice(0, LISTED);
  const items = shown.map(({ wait, others }) => {
    const { reason, head, rest } = because(wait);
    return make("li", {}, make("button", { type: "button", style: reasonStyle(reason), onclick: () => choose(wait) },
      make("span", { class: "much" }, timeText(wait.waited)),
      make("span", { class: "what" }, `${ranksText([wait, ...others].map((one) => one.rank.rank).sort((a, b) => a - b))}: ${collectiveText(wait)}`),
      make("span", { class: "why" }, make("b", {}, reason === LATE ? `late: ${head.replace(" came late", "")}` : wait.state !== "" ? head : REASONS[reason].name),
        reason === LATE ? rest.replace(/^: (it was|it is) /, ", ") : "", ` \u00b7 ${placeText(wait)}`)));
  });
  if (groups.length === 0) items.push(make("li", { class: "more" }, "None."));
  else if (shown.length === 0) items.push(make("li", { class: "more" }, "No wait of what was searched."));
  else if (view.found === null && groups.length > LISTED) items.push(make("li", { class: "more" }, `and ${groups.length - LISTED} shorter ones`));
  byId("waits").replaceChildren(...items);
  return shown;
}

function markChosen(shown, chosen) {
  [...byId("waits").querySelectorAll("button")].forEach((button, i) => {
    const isIt = chosen !== null && (shown[i].wait === chosen || shown[i].others.includes(chosen));
    button.setAttribute("aria-current", String(isIt));
    if (!isIt) return;
    // Not by scrollIntoView(), which scrolls the whole page, too, where the list is below the lanes.
    const list = byId("waits");
    const [top, bottom] = [button.offsetTop - list.offsetTop, button.offsetTop - list.offsetTop + button.offsetHeight];
    if (top < list.scrollTop) list.scrollTop = top;
    if (bottom > list.scrollTop + list.clientHeight) list.scrollTop = bottom - list.clientHeight;
  });
}

function showLegend(timeline) {
  const entry = (colour, text, kind = "") => make("span", {}, make("i", { class: kind, style: colourOf(colour) }), text);
  byId("legend").replaceChildren(
    make("b", {}, "Compute"), entry("--forward-b", "forward"), entry("--backward-b", "backward"), entry("--between", "between steps"),
    make("b", {}, "Waits"), ...REASONS.map((reason) => entry(reason.colour, reason.name, "wait")),
    make("b", {}, "Collectives"), ...LANES.filter((_, i) => timeline.lanes[i] > 0).map((lane) => entry(`--${lane}`, lane)),
    make("b", {}, "Memory"), ...STACK.map((kind) => entry(KINDS[kind], timeline.kinds[kind])));
}

/** The plan beside what was measured, if there is one. */
function showPlan(timeline) {
  byId("plan").hidden = timeline.plan === null;
  if (timeline.plan === null) return;
  const text = (isTime, value) => (value < 0 ? "\u2013" : isTime ? timeText(value * 1e6) : bytesText(value));
  const exact = (isTime, value) => (value < 0 ? "not known" : isTime ? `${value} ms` : `${value.toLocaleString("en")} bytes`);
  const rows = timeline.plan.values.map(([name, isTime, planned, measured, rank]) => make("tr", {},
    make("th", { scope: "row" }, name),
    make("td", { title: exact(isTime, planned) }, text(isTime, planned)),
    make("td", { title: `${exact(isTime, measured)}${rank < 0 ? "" : `, on rank ${rank}`}` }, text(isTime, measured)),
    make("td", {}, planned > 0 && measured >= 0 ? (measured / planned).toFixed(2) : "")));
  byId("planned").replaceChildren(...rows);
}

function showTip(what, x, y, memoryKinds) {
  const tip = byId("tip");
  const lines = what === null ? null : tipLines(what, memoryKinds);
  tip.hidden = lines === null;
  if (lines === null) return;
  tip.replaceChildren(make("b", {}, lines[0]), ...lines.slice(1).map((line) => make("div", {}, line)));
  const room = tip.parentElement.getBoundingClientRect();
  tip.style.left = `${Math.max(Math.min(x + 14, room.width - tip.offsetWidth - 6), 4)}px`;
  tip.style.top = `${y + 18 + tip.offsetHeight > room.height ? y - tip.offsetHeight - 10 : y + 18}px`;
}

function tipLines({ row, collective, span, memory }, memoryKinds) {
  if (collective && row.kind === "compute") {
    const { head, rest } = because(collective);
    return [`${timeText(collective.waited)} waiting for the ${collectiveText(collective)}`, `because ${head}${rest}`];
  }
  if (collective) {
    const wait = collective.waited > 0 ? `waited for ${timeText(collective.waited)}: ${REASONS[mainReason(collective)].name}` : "no rank waited for it";
    return [collectiveText(collective), `${timeText(collective.ended - collective.began)}, ${bytesText(collective.bytes)}; ${wait}`];
  }
  if (span) return [`${span.pass}${span.unit ? ` of '${span.unit}'` : ""}`, `${timeText(span.ended - span.began)} until the next unit, with waits`];
  if (memory) return [bytesText(memory.bytes), ...[...STACK].reverse().filter((kind) => memory.held[kind] > 0).map((kind) => `${bytesText(memory.held[kind])} ${memoryKinds[kind]}`)];
  return null;
}
