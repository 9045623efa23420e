// The data of the page: lists of numbers become arrays that can be searched by time. Times are ns from the beginning of the timeline.

const LANES = ["gather", "reduce", "outer", "host"];
const PASSES = ["", "forward", "backward", "between steps", ""];
const REASONS = [
  { name: "late rank", colour: "--late", help: "another rank had not made the call yet" },
  { name: "prefetch", colour: "--prefetch", help: "the gather began only when its unit was needed" },
  { name: "queue", colour: "--queue", help: "earlier collectives were under way" },
  { name: "link", colour: "--link", help: "the data were on their way" },
  { name: "host", colour: "--host-reason", help: "this rank was copying or adding up what had arrived" },
];
const LATE = 0;
// The kinds of memory by their place in the data, and the order in which they are stacked: what stays is at the bottom.
const KINDS = ["--main-parameters", "--main-gradients", "--gathered", "--unreduced", "--communication", "--optimizer"];
const STACK = [0, 5, 1, 3, 4, 2];
const MOST_TRACKS = 3; // of a lane that are drawn; further ones share the last

function readSpans(numbers, names) {
  const spans = [];
  let time = 0;
  for (let i = 0; i < numbers.length; i += 4) {
    time += numbers[i];
    spans.push({ began: time, ended: time + numbers[i + 1], pass: PASSES[numbers[i + 2]], unit: names[numbers[i + 3]], name: numbers[i + 3] });
  }
  return spans;
}

function readCollectives(numbers, names, rank) {
  const all = [];
  let time = 0;
  for (let i = 0; i < numbers.length;) {
    time += numbers[i];
    const [, length, wait, arrived, lane, track, unit, operation, row, number, bytes, flags] = numbers.slice(i, i + 12);
    i += 12;
    const collective = {
      rank, lane, track: Math.min(track, MOST_TRACKS - 1), unit: names[unit], operation: names[operation], row: names[row], number, bytes,
      names: [unit, operation], began: time, ended: time + length, wait: wait < 0 ? -1 : time + wait, arrived: arrived < 0 ? -1 : time + arrived,
      inBackward: (flags & 1) !== 0, state: flags & 2 ? "has not ended" : flags & 4 ? "failed" : "", waited: 0, isWait: false, reasons: null, sections: null, lateRank: -1, lateWas: "",
    };
    if (wait >= 0) {
      collective.reasons = numbers.slice(i, i + REASONS.length);
      collective.lateRank = numbers[i + REASONS.length];
      collective.lateWas = names[numbers[i + REASONS.length + 1]];
      collective.waited = length - wait;
      collective.isWait = collective.waited > 0 || collective.state !== "";
      i += REASONS.length + 2;
    }
    all.push(collective);
  }
  return all;
}

function readMemory(numbers) {
  const moments = [];
  let time = 0;
  let held = KINDS.map(() => 0);
  for (let i = 0; i < numbers.length; i += 1 + KINDS.length) {
    time += numbers[i];
    held = held.map((bytes, kind) => bytes + numbers[i + 1 + kind]);
    moments.push({ time, held, bytes: held.reduce((sum, bytes) => sum + bytes, 0) });
  }
  return moments;
}

function readPeaks(numbers, names) {
  const peaks = [];
  let time = 0;
  for (let i = 0; i < numbers.length; i += 3) {
    time += numbers[i];
    peaks.push({ time, bytes: numbers[i + 1], unit: names[numbers[i + 2]] });
  }
  return peaks;
}

function readRank(of, names) {
  const rank = { rank: of.rank, host: of.host, clockAhead: of.clock_ahead, clockWithin: of.clock_within, steps: [] };
  for (let i = 0; i < of.steps.length; i += 4) {
    rank.steps.push({ number: of.steps[i], began: of.steps[i + 1], ended: of.steps[i + 2], isWhole: of.steps[i + 3] === 1 });
  }
  rank.compute = readSpans(of.compute, names);
  rank.collectives = readCollectives(of.collectives, names, rank);
  rank.waits = rank.collectives.filter((c) => c.isWait).sort((a, b) => a.wait - b.wait);
  rank.memory = readMemory(of.memory);
  rank.peaks = readPeaks(of.peaks, names);
  rank.tracks = LANES.map(() => []); // by lane and track, in time
  for (const collective of rank.collectives) (rank.tracks[collective.lane][collective.track] ??= []).push(collective);
  rank.tracks = rank.tracks.map((tracks) => Array.from(tracks, (track) => track ?? []));
  return rank;
}

/** All of it: {title, length, names, missing, why (or null), kinds, plan (or null), ranks, lanes (which are used), mostBytes}. */
function readTimeline(text) {
  const from = JSON.parse(text);
  const timeline = { title: from.title, length: Math.max(from.length, 1), names: from.names, missing: from.missing, why: from.why, kinds: from.kinds, plan: from.plan };
  timeline.ranks = from.ranks.map((rank) => readRank(rank, from.names));
  timeline.byRank = new Map(timeline.ranks.map((rank) => [rank.rank, rank]));
  timeline.lanes = LANES.map((_, lane) => Math.max(...timeline.ranks.map((rank) => rank.tracks[lane].length), 0));
  timeline.mostBytes = Math.max(timeline.plan?.peak ?? 0, 1);
  for (const rank of timeline.ranks) {
    for (const moment of rank.memory) timeline.mostBytes = Math.max(timeline.mostBytes, moment.bytes);
    for (const peak of rank.peaks) timeline.mostBytes = Math.max(timeline.mostBytes, peak.bytes);
  }
  timeline.steps = stepsOf(timeline);
  return timeline;
}

/** The steps of all ranks together, by number. */
function stepsOf(timeline) {
  const steps = new Map();
  for (const rank of timeline.ranks) {
    for (const { number, began, ended, isWhole } of rank.steps) {
      const step = steps.get(number) ?? { number, began, ended, isWhole: true };
      steps.set(number, { number, began: Math.min(step.began, began), ended: Math.max(step.ended, ended), isWhole: step.isWhole && isWhole });
    }
  }
  return [...steps.values()].sort((a, b) => a.number - b.number);
}

/**
 * The waits of all ranks, the longest first: those in vain for the first cause, its own, and then the others; of these, those of whole steps,
 * or all if there are none.
 */
function longestWaits(timeline) {
  const weight = (wait) => (wait.state === "" ? 0 : wait.rank.rank === timeline.why?.rank ? 1 : 2);
  const isOfTraining = (wait) => wait.state !== "" || wait.rank.steps.some((step) => step.isWhole && wait.wait >= step.began && wait.wait < step.ended);
  const all = timeline.ranks.flatMap((rank) => rank.waits);
  const ofTraining = all.filter(isOfTraining);
  return (ofTraining.length > 0 ? ofTraining : all).sort((a, b) => weight(b) - weight(a) || b.waited - a.waited);
}

/** Waits of several ranks for one collective and one reason have one cause: {wait, others} with the longest of them, in the order of the list. */
function groupsOf(waits) {
  const groups = new Map();
  for (const wait of waits) {
    const key = `${wait.row} ${wait.number} ${mainReason(wait)} ${wait.lateRank}`;
    const group = groups.get(key);
    if (group) group.others.push(wait);
    else groups.set(key, { wait, others: [] });
  }
  return [...groups.values()];
}

/** "ranks 0-3 and 5", of numbers in order. */
function ranksText(ranks) {
  const runs = [];
  for (const rank of ranks) {
    const last = runs[runs.length - 1];
    if (last && last[1] === rank - 1) last[1] = rank;
    else runs.push([rank, rank]);
  }
  const texts = runs.map(([first, last]) => (first === last ? `${first}` : last === first + 1 ? `${first}, ${last}` : `${first}-${last}`));
  return `${ranks.length === 1 ? "rank" : "ranks"} ${texts.slice(0, 6).join(", ")}${texts.length > 6 ? ", ..." : ""}`;
}

/** "dp_shard, ranks 0-7" of "dp_shard 0-7 #1". */
function rowText(row) {
  const [, dimension, ranks] = /^(\S+) (.*?)(?: #\d+)?$/.exec(row) ?? [];
  if (dimension === undefined) return row;
  return `${dimension}, ${/^\d+$/.test(ranks) ? "rank" : "ranks"} ${ranks}`;
}

/** The reason that took the most of a wait. */
function mainReason(wait) {
  let most = 0;
  for (let i = 1; i < REASONS.length; i++) if (wait.reasons[i] > wait.reasons[most]) most = i;
  return most;
}

/** The sections of a wait in time: [reason, begin, end]. */
function sectionsOf(wait) {
  if (wait.sections) return wait.sections;
  let time = wait.wait;
  wait.sections = [0, 2, 1, 3, 4].filter((reason) => wait.reasons[reason] > 0).map((reason) => {
    const begin = time;
    time += wait.reasons[reason];
    return [reason, begin, time];
  });
  return wait.sections;
}

/** The first of the entries, which are in time and do not overlap, that ends behind a time. */
function firstBehind(entries, time, end = (entry) => entry.ended) {
  let low = 0;
  let high = entries.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (end(entries[middle]) > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** The call of the same collective on another rank. */
function callOn(timeline, number, collective) {
  const rank = timeline.byRank.get(number);
  return rank?.collectives.find((other) => other.number === collective.number && other.row === collective.row);
}

function timeText(ns) {
  const ms = Math.abs(ns) / 1e6;
  if (ms >= 1000) return `${(ns / 1e9).toFixed(ms >= 1e5 ? 0 : 2)} s`;
  if (ms >= 1) return `${(ns / 1e6).toFixed(ms >= 100 ? 0 : ms >= 10 ? 1 : 2)} ms`;
  return ms >= 0.001 ? `${(ns / 1e3).toFixed(ms >= 0.1 ? 0 : 1)} \u00b5s` : `${Math.round(ns)} ns`;
}

/** A time on the ruler, as exact as its ticks are apart. */
function tickText(time, tick) {
  if (Math.round(time) === 0) return "0";
  const [unit, ns] = time >= 1e9 && tick >= 1e7 ? ["s", 1e9] : time >= 1e6 || tick >= 1e5 ? ["ms", 1e6] : ["\u00b5s", 1e3];
  return `${(time / ns).toFixed(Math.max(0, Math.ceil(Math.log10(ns / tick) - 1e-9)))} ${unit}`;
}

function bytesText(bytes) {
  if (bytes < 1024) return `${bytes} B`;
  const power = Math.min(Math.floor(Math.log2(bytes) / 10), 4);
  const value = bytes / 1024 ** power;
  return `${value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0)} ${["", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

function collectiveText(collective) {
  return collective.operation + (collective.unit && !collective.unit.startsWith("(all") ? ` of '${collective.unit}'` : "");
}

/** "because rank 1 came late: it was in forward of 'blocks.0'": the words, and the reason that they explain. */
function because(wait) {
  const reason = mainReason(wait);
  if (wait.lateRank >= 0 && (reason === LATE || wait.state !== "")) {
    const verb = wait.state === "" ? "came late" : "did not come";
    return { reason: LATE, head: `rank ${wait.lateRank} ${verb}`, rest: `: it was ${wait.lateWas}` };
  }
  if (wait.state !== "") return { reason, head: `it ${wait.state}`, rest: ", though all ranks that have left a file had called it" };
  const words = {
    1: ["it was prefetched too late", ": the gather began only when its unit was needed"],
    2: ["it stood in a queue", ": earlier collectives were under way"],
    3: ["of the link", ": all ranks had made the call, and the data were on their way"],
    4: ["of this host", ": the data had arrived, and the rank was copying or adding them up"],
  }[reason] ?? ["of a cause without events", ""];
  return { reason, head: words[0], rest: words[1] };
}
