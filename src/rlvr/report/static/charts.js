// Charts as SVG: lines with bands, stacked areas, histograms over time. Each is a card with a title.

// Units of the viewBox, which CSS scales to the width of the card. LEFT holds the labels of y, BOTTOM those of x.
const WIDE = 420, HIGH = 210, LEFT = 52, RIGHT = 12, TOP = 10, BOTTOM = 26;

// Half of a number below the axis, the word "step", and a space between them.
const LABEL = 44;

// A wide chart has the same height for more than twice the width.
const WIDEST = 980;

function frame(title, about, wide = WIDE) {
  const svg = draw("svg", { viewBox: `0 0 ${wide} ${HIGH}`, role: "img", "aria-label": title });
  const heading = make("h3", { title: (about || "").replaceAll("`", "") }, title);
  const caption = about ? make("p", { class: "soft small caption", title: about.replaceAll("`", "") }, ...prose(about.split("\n")[0])) : null;
  return { svg, card: make("div", { class: "card chart" }, heading, caption, svg) };
}

function axes(svg, [x0, x1], [y0, y1], { wide = WIDE, unit = "", log = false, form = show } = {}) {
  const px = (x) => LEFT + ((x - x0) / (x1 - x0 || 1)) * (wide - LEFT - RIGHT);
  const scale = log ? Math.log10 : (y) => y;
  const py = (y) => HIGH - BOTTOM - ((scale(y) - scale(y0)) / (scale(y1) - scale(y0) || 1)) * (HIGH - TOP - BOTTOM);
  for (const y of log ? decades(y0, y1) : ticks(y0, y1, 5)) {
    svg.append(draw("line", { class: "gridline", x1: LEFT, x2: wide - RIGHT, y1: py(y), y2: py(y) }));
    svg.append(draw("text", { x: LEFT - 6, y: py(y) + 4, "text-anchor": "end" }, form(y)));
  }
  // In the row of the numbers, where no curve passes; a number that would touch it is left out.
  svg.append(draw("text", { class: "label", x: wide - RIGHT, y: HIGH - 9, "text-anchor": "end" }, "step"));
  if (unit) svg.append(draw("text", { class: "label", x: LEFT + 4, y: TOP + 8 }, unit));
  // Steps are integers, so that a short run has no tick at 1.5.
  const marks = ticks(x0, x1, 6).filter((x) => Number.isInteger(x) && x >= x0 && x <= x1 && px(x) < wide - RIGHT - LABEL);
  for (const x of marks) svg.append(draw("text", { x: px(x), y: HIGH - 9, "text-anchor": "middle" }, show(x)));
  svg.append(draw("line", { class: "axis", x1: LEFT, x2: wide - RIGHT, y1: py(y0), y2: py(y0) }));
  return { px, py };
}

// The powers of ten within a range, or its ends where there is none.
function decades(low, high) {
  const found = [];
  for (let power = Math.ceil(Math.log10(low) - 1e-9); 10 ** power <= high * (1 + 1e-9); power++) found.push(10 ** power);
  return found.length ? found : [low, high];
}

function hover(svg, x0, x1, texts, wide = WIDE) {
  const cursor = draw("line", { class: "cursor", y1: TOP, y2: HIGH - BOTTOM, visibility: "hidden" });
  svg.append(cursor);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    // From pixels to units of the viewBox, then to steps.
    const inside = ((event.clientX - box.left) / box.width) * wide;
    const found = texts(x0 + ((inside - LEFT) / (wide - LEFT - RIGHT)) * (x1 - x0));
    if (!found) return;
    const place = LEFT + ((found.x - x0) / (x1 - x0 || 1)) * (wide - LEFT - RIGHT);
    for (const side of ["x1", "x2"]) cursor.setAttribute(side, place);
    cursor.setAttribute("visibility", "visible");
    tip.show(event, found.text);
  });
  svg.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); tip.hide(); });
}

// Binary search in a rising list.
function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle; else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

// Exponential moving average: s_t = w s_(t-1) + (1 - w) x_t, beginning at the first value.
function smoothed(values, weight) {
  let kept = null;
  return values.map((value) => {
    if (!known(value)) return null;
    kept = kept === null ? value : weight * kept + (1 - weight) * value;
    return kept;
  });
}

function path(xs, ys, px, py) {
  let text = "", pen = false;
  for (let i = 0; i < xs.length; i++) {
    if (!known(ys[i])) continue;  // a metric that is not there at a step (an evaluation) does not break its line
    text += `${pen ? "L" : "M"}${px(xs[i]).toFixed(1)} ${py(ys[i]).toFixed(1)}`;
    pen = true;
  }
  return text;
}

// series: [{label, color, x, y, low?, high?, faint?}]
function lineChart(title, about, series, { stages = [], marks = [], smooth = 0, share = false, unit = "", log = false, wide = WIDE } = {}) {
  const { svg, card } = frame(title, about, wide);
  const form = share ? percent : show;
  const all = series.flatMap((s) => [...s.y, ...(s.low || []), ...(s.high || [])]).filter(known);
  const steps = series.flatMap((s) => s.x.filter((_, i) => known(s.y[i])));
  if (!all.length) { card.append(make("p", { class: "soft small" }, "nothing was measured")); return card; }
  let [low, high] = [all.reduce((a, b) => Math.min(a, b)), all.reduce((a, b) => Math.max(a, b))];
  // A curve that is near 0 at its lowest starts at 0; one that moves within a narrow band high up keeps its band.
  if (low >= 0 && low < 0.5 * high) low = 0;
  // A logarithm needs values above 0; a curve that has others keeps its plain axis.
  log = log && all.every((value) => value > 0);
  if (log) low = all.reduce((a, b) => Math.min(a, b));
  // Less than a tenth of the value is no movement: 32.4 to 32.8 tokens would fill the chart, and look like chaos.
  const least = 0.1 * Math.max(Math.abs(low), Math.abs(high));
  if (!log && low !== 0 && high - low < least) [low, high] = [(low + high - least) / 2, (low + high + least) / 2];
  // 6 % of air; a constant curve has no range, so a tenth of its value, or 1 where that is 0.
  const pad = log ? 0 : (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  [low, high] = [low === 0 ? 0 : low - pad, share ? Math.min(high + pad, Math.max(1, high)) : high + pad];
  const x0 = steps.reduce((a, b) => Math.min(a, b)), x1 = Math.max(steps.reduce((a, b) => Math.max(a, b)), x0 + 1);
  const { px, py } = axes(svg, [x0, x1], [low, high], { wide, unit: share ? "" : unit, log, form: share ? shortPercent : show });
  for (const [name, step] of stages) {
    if (step <= x0 || step > x1) continue;
    svg.append(draw("line", { class: "stage", x1: px(step), x2: px(step), y1: TOP, y2: HIGH - BOTTOM }));
    svg.append(draw("text", { x: px(step) + 4, y: TOP + 9 }, name));
  }
  for (const one of series) {
    if (one.low) {
      const there = one.x.map((_, i) => i).filter((i) => known(one.low[i]));
      const up = there.map((i) => `${px(one.x[i]).toFixed(1)} ${py(one.high[i]).toFixed(1)}`);
      const down = there.map((i) => `${px(one.x[i]).toFixed(1)} ${py(one.low[i]).toFixed(1)}`).reverse();
      if (there.length) svg.append(draw("path", { d: `M${[...up, ...down].join("L")}Z`, fill: one.color, opacity: 0.16 }));
    }
    // Up to 40 points (an evaluation every some steps) are drawn as dots and never smoothed.
    const few = one.y.filter(known).length <= 40;
    const line = { fill: "none", stroke: one.color, "stroke-linejoin": "round" };
    if (smooth > 0 && !few) svg.append(draw("path", { ...line, d: path(one.x, one.y, px, py), opacity: 0.25, "stroke-width": 1 }));
    const shown = smooth > 0 && !few ? smoothed(one.y, smooth) : one.y;
    svg.append(draw("path", { ...line, d: path(one.x, shown, px, py), "stroke-width": 1.7 }));
    if (few) one.x.forEach((x, i) => known(one.y[i]) && svg.append(draw("circle", { cx: px(x), cy: py(one.y[i]), r: 2.6, fill: one.color })));
  }
  for (const mark of marks) {
    // A triangle of 10 by 9 units that points down at the step.
    const sign = draw("path", { class: "mark", d: `M${px(mark.step)} ${TOP + 12}l-5 -9h10z` });
    sign.append(draw("title", {}, mark.text));
    if (mark.step >= x0 && mark.step <= x1) svg.append(sign);
  }
  const usable = series.map((s) => { const at = s.x.map((_, i) => i).filter((i) => known(s.y[i])); return { ...s, at, xs: at.map((i) => s.x[i]) }; }).filter((s) => s.at.length);
  hover(svg, x0, x1, (x) => {
    const points = usable.map((s) => { const k = nearest(s.xs, x); return { s, i: s.at[k], x: s.xs[k] }; });
    const near = points.reduce((a, b) => (Math.abs(b.x - x) < Math.abs(a.x - x) ? b : a));
    const lines = points.filter((p) => p.x === near.x).map(({ s, i }) =>
      `${s.label}: ${form(s.y[i])}${s.low && known(s.low[i]) ? ` (${form(s.low[i])} to ${form(s.high[i])})` : ""}`);
    return { x: near.x, text: [`step ${near.x}`, ...lines].join("\n") };
  }, wide);
  if (series.length > 1 || series.some((s) => s.low)) card.append(legend(series));
  return card;
}

// parts: [{label, color, y}] over one x
function stackChart(title, about, x, parts, { whole = false } = {}) {
  const { svg, card } = frame(title, about);
  const at = x.map((_, i) => i).filter((i) => parts.some((p) => known(p.y[i])));
  if (!at.length) { card.append(make("p", { class: "soft small" }, "nothing was measured")); return card; }
  // The 98th percentile and a tenth more is the top of the chart.
  const sums = at.map((i) => parts.reduce((sum, p) => sum + (known(p.y[i]) ? p.y[i] : 0), 0));
  const sorted = [...sums].sort((a, b) => a - b);
  const top = whole ? 1 : 1.1 * sorted[Math.floor(0.98 * (sorted.length - 1))] || 1;  // a few slow steps are cut off
  const x0 = x[at[0]], x1 = Math.max(x[at[at.length - 1]], x0 + 1);
  const { px, py } = axes(svg, [x0, x1], [0, top], { form: whole ? shortPercent : show });
  const base = at.map(() => 0);
  for (const part of parts) {
    const under = base.map((y, k) => `${px(x[at[k]]).toFixed(1)} ${py(Math.min(y, top)).toFixed(1)}`);
    at.forEach((i, k) => { base[k] += known(part.y[i]) ? part.y[i] : 0; });
    const over = base.map((y, k) => `${px(x[at[k]]).toFixed(1)} ${py(Math.min(y, top)).toFixed(1)}`);
    svg.append(draw("path", { d: `M${[...over, ...under.reverse()].join("L")}Z`, fill: part.color, opacity: 0.82 }));
  }
  const xs = at.map((i) => x[i]);
  hover(svg, x0, x1, (value) => {
    const k = nearest(xs, value), i = at[k];
    const lines = parts.filter((p) => known(p.y[i]) && p.y[i] !== 0).reverse().map((p) => `${p.label}: ${whole ? percent(p.y[i]) : show(p.y[i])}`);
    return { x: xs[k], text: [`step ${xs[k]}`, ...lines].join("\n") };
  });
  card.append(legend(parts));
  return card;
}

function histogramChart(title, about, data, hue) {
  const { svg, card } = frame(title, about);
  if (!data) { card.append(make("p", { class: "soft small" }, "no recorded rollouts")); return card; }
  const { edges, steps, counts } = data, bins = edges.length - 1;
  const x0 = steps[0][0], x1 = Math.max(steps[steps.length - 1][1], x0 + 1);
  const { py } = axes(svg, [x0, x1], [edges[0], edges[bins]]);
  const width = (WIDE - LEFT - RIGHT) / steps.length;
  counts.forEach((column, c) => {
    // Darker with more rollouts, in proportion to the fullest cell of the column, so that steps with few rollouts are
    // readable.
    const total = column.reduce((a, b) => a + b, 0), most = Math.max(...column, 1);
    column.forEach((count, b) => {
      if (!count) return;
      const y = py(edges[b + 1]);
      const cell = draw("rect", { x: LEFT + c * width, y, width: width + 0.3, height: Math.max(py(edges[b]) - y, 1), fill: hue, opacity: (0.12 + 0.88 * count / most).toFixed(2) });
      cell.addEventListener("pointermove", (event) => tip.show(event,
        `steps ${steps[c][0]} to ${steps[c][1]}\n${show(edges[b])} to ${show(edges[b + 1])}\n${count} of ${total} (${(100 * count / total).toFixed(1)} %)`));
      cell.addEventListener("pointerleave", tip.hide);
      svg.append(cell);
    });
  });
  return card;
}
