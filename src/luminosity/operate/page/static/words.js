// Numbers, times and sizes as text. An empty argument (null, undefined, NaN) is "–": not known.

const NONE = "–";
const isKnown = (value) => value !== null && value !== undefined && !Number.isNaN(value);
const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** 12,345 and 123.5 M; all digits of it with `exact`. */
export function count(value, exact = false) {
  if (!isKnown(value)) return NONE;
  const size = Math.abs(value);
  if (exact || size < 10_000_000) return plain.format(value);
  if (size < 1e9) return `${(value / 1e6).toFixed(1)} M`;
  return size < 1e12 ? `${(value / 1e9).toFixed(2)} G` : `${plain.format(value / 1e12)} T`;
}

/** A number of at most four digits, for axes and readouts. */
export function short(value) {
  if (!isKnown(value)) return NONE;
  const size = Math.abs(value);
  for (const [least, unit] of [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e4, " k"]]) {
    if (size >= least) return `${trimmed(value / (least === 1e4 ? 1e3 : least))}${unit}`;
  }
  return size >= 100 || Number.isInteger(value) ? plain.format(value) : trimmed(value);
}

function trimmed(value) {
  return String(Number(value.toPrecision(3)));
}

/** Elements in a second. */
export function rate(value) {
  if (!isKnown(value)) return NONE;
  if (value <= 0) return "0/s";
  return value >= 10 ? `${count(Math.round(value))}/s` : `${trimmed(value)}/s`;
}

/** The two largest units: 10 min 5 s. */
export function duration(seconds) {
  if (!isKnown(seconds)) return NONE;
  if (seconds < 0) return `−${duration(-seconds)}`;
  if (seconds < 0.001) return seconds ? `${trimmed(seconds * 1e6)} µs` : "0 s";
  if (seconds < 0.9995) return `${trimmed(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 172_800) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86_400)} d ${Math.floor((whole % 86_400) / 3600)} h`;
}

/** 438 MB, in powers of ten, as the commands print them. */
export function bytes(value) {
  if (!isKnown(value)) return NONE;
  for (const [least, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (Math.abs(value) >= least) return `${trimmed(value / least)} ${unit}`;
  }
  return `${plain.format(value)} B`;
}

/** Whole percent, rounded down: only all of it is 100%. */
export function percent(fraction) {
  if (!isKnown(fraction)) return NONE;
  if (fraction > 0 && fraction < 0.01) return "< 1%";
  return `${Math.floor(100 * fraction + 1e-9)}%`;
}

/** An amount of money with its currency; small amounts keep two digits that count. */
export function money(value, currency = "USD") {
  if (!isKnown(value)) return NONE;
  const digits = value !== 0 && Math.abs(value) < 0.1 ? Math.min(6, 1 - Math.floor(Math.log10(Math.abs(value)))) : 2;
  return `${value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${currency}`;
}

/** A moment in the reader's time zone: 21 Sep, 14:05. */
export function moment(seconds) {
  if (!isKnown(seconds)) return NONE;
  const date = new Date(seconds * 1000);
  const year = date.getFullYear() === new Date().getFullYear() ? undefined : "numeric";
  return date.toLocaleString("en-GB", { day: "numeric", month: "short", year, hour: "2-digit", minute: "2-digit" });
}

/** The time of day in the reader's time zone, to the millisecond: 14:05:03.120. */
export function clock(seconds) {
  const date = new Date(seconds * 1000);
  return `${date.toLocaleTimeString("en-GB")}.${String(date.getMilliseconds()).padStart(3, "0")}`;
}

/** A p-value: three digits that count. */
export function probability(value) {
  if (!isKnown(value)) return NONE;
  return value >= 0.0001 || value === 0 ? String(Number(value.toPrecision(2))) : value.toExponential(1);
}

/** "1 worker", "3 workers". */
export function counted(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** "a", "a and b", "a, b and 3 others". */
export function listed(names, most = 3) {
  if (names.length > most) return `${names.slice(0, most - 1).join(", ")} and ${names.length - most + 1} others`;
  if (names.length < 2) return names.join("");
  return `${names.slice(0, -1).join(", ")} and ${names[names.length - 1]}`;
}

/** Cut a label in the middle. Its end, which tells it from others, keeps more than its beginning. */
export function shortened(label, most) {
  if (label.length <= most) return label;
  const tail = Math.ceil((most - 1) * 0.6);
  return `${label.slice(0, most - tail - 1)}…${label.slice(label.length - tail)}`;
}

/** Say how much of the time a model computes: on a device, on a server, or in its worker; empty if that is not known. */
export function computes(view) {
  if (!view?.worker_seconds || !view.device_busy_seconds) return "";
  const share = percent(Math.min(1, view.device_busy_seconds / view.worker_seconds));
  if (view.runs_on === "server") return ` Its requests are in flight ${share} of the time.`;
  return ` Its ${view.runs_on === "device" ? "device" : "model"} computes ${share} of the time.`;
}
