// Scales from values to pixels, and round ticks.

/** Return a linear scale as a function, with `low` and `high`. */
export function linear(low, high, from, to) {
  const span = high - low || 1;
  const scale = (value) => from + ((value - low) / span) * (to - from);
  return Object.assign(scale, { low, high, invert: (at) => low + ((at - from) / (to - from || 1)) * span });
}

/** Return a logarithmic scale. Values of 0 and less stand at its lower end. */
export function logarithmic(low, high, from, to) {
  const inner = linear(Math.log10(low), Math.log10(high), from, to);
  return Object.assign((value) => inner(Math.log10(Math.max(value, low))), { low, high });
}

/** Return about this many round numbers between two. */
export function ticks(low, high, about, whole = false) {
  if (!(high > low)) return [low];
  let step = 10 ** Math.floor(Math.log10((high - low) / about));
  const factor = [1, 2, 5, 10].find((each) => each * step * (about + 0.5) >= high - low) ?? 10;
  step *= factor;
  if (whole) step = Math.max(1, step);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at <= Math.floor(high / step + 1e-9); at += 1) found.push(at * step || 0); // never -0
  return found;
}

const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400, 172_800, 432_000, 864_000];

/** Return round times in seconds between two. */
export function timeTicks(low, high, about) {
  const span = high - low;
  if (span < about) return ticks(low, high, about);
  const step = TIME_STEPS.find((each) => span / each <= about) ?? 10 ** Math.ceil(Math.log10(span / about));
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + 1e-9; at += step) found.push(at);
  return found;
}

/** Return a time on an axis: 0, 30 s, 5 min, 1:30 h. */
export function timeLabel(seconds, span) {
  if (seconds === 0) return "0";
  if (span < 120) return `${Number(seconds.toPrecision(3))} s`;
  if (span < 7200) return seconds % 60 ? `${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")} min` : `${seconds / 60} min`;
  if (span < 172_800) {
    const minutes = Math.round((seconds % 3600) / 60);
    return minutes ? `${Math.floor(seconds / 3600)}:${String(minutes).padStart(2, "0")} h` : `${seconds / 3600} h`;
  }
  return `${Number((seconds / 86_400).toPrecision(3))} d`;
}

/** Return the upper end of an axis: the next tick above the largest value. */
export function roundUp(value, about = 4, whole = false) {
  if (!(value > 0)) return 1;
  const steps = ticks(0, value, about, whole);
  const step = steps.length > 1 ? steps[1] - steps[0] : value;
  return Math.ceil(value / step - 1e-9) * step;
}
