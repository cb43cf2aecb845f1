// Draws a few times a second at most, together with the screen, and not at all in a hidden tab.

const EVERY_MS = 350; // figures that change faster can't be read

/** Return a function that asks for a call of `draw`. Its property `stop` ends it. */
export function drawer(draw) {
  let isWanted = false;
  let isWaiting = false;
  let drawnAt = -EVERY_MS;
  let timer = 0;

  function next() {
    if (isWaiting || !isWanted || document.hidden) return;
    isWaiting = true;
    const wait = Math.max(0, drawnAt + EVERY_MS - performance.now());
    timer = setTimeout(() => requestAnimationFrame(now), wait);
  }

  function now() {
    isWaiting = false;
    if (!isWanted || document.hidden) return;
    isWanted = false;
    drawnAt = performance.now();
    draw();
  }

  const request = () => {
    isWanted = true;
    next();
  };
  const onVisible = () => next();
  document.addEventListener("visibilitychange", onVisible);
  request.stop = () => {
    isWanted = false;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", onVisible);
  };
  return request;
}
