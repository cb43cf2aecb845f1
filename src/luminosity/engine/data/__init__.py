"""The data of a run, as the engine holds it: blocks, groups, side inputs, state, timers, watermarks."""
