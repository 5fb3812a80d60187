// Which curves are shown: those of all runs, and of several seeds of one experiment their mean with a band.

// Shown at first, in this order: what is earned, what groups teach, what is written, the policy, the update, the
// machine. EVAL stands for the first held-out score that the run has, REWARDS for the terms of its reward.
const GROUPS = {
  "Reward": ["reward/mean", "EVAL", "REWARDS"],
  "Groups and completions": ["group/mixed", "group/all_wrong", "group/all_correct", "completion/length_mean", "completion/truncated", "verdict/unparsable", "completion/repetition"],
  "Policy and update": ["entropy", "kl/ref", "grad_norm", "ratio/clipped_high", "mismatch/mean", "loss/policy", "lr"],
  "Machine": ["time/tokens_per_second", "mfu/update", "gpu/idle", "memory/update_max", "memory/rollout_max"],
};
// Open at first: the other groups are for a look when these are odd.
const OPEN = 2;

function experiments(runs) {
  const groups = new Map();
  runs.forEach((run, number) => {
    if (!groups.has(run.experiment)) groups.set(run.experiment, []);
    groups.get(run.experiment).push(number);
  });
  return [...groups.values()];
}

function seedsTogether(runs, members, values) {
  const steps = [...new Set(members.flatMap((m) => runs[m].steps))].sort((a, b) => a - b);
  const places = members.map((m) => new Map(runs[m].steps.map((step, i) => [step, i])));
  const result = { x: steps, y: [], low: [], high: [] };
  for (const step of steps) {
    const there = members.map((m, k) => { const i = places[k].get(step); return i === undefined ? null : values[k][i]; }).filter(known);
    const sum = there.reduce((a, b) => a + b, 0);
    result.y.push(there.length ? sum / there.length : null);
    result.low.push(there.length ? Math.min(...there) : null);
    result.high.push(there.length ? Math.max(...there) : null);
  }
  return result;
}

function seriesOf(runs, name, bands) {
  const series = [];
  const groups = bands ? experiments(runs) : runs.map((_, number) => [number]);
  groups.forEach((members, g) => {
    const there = members.filter((m) => runs[m].columns[name]);
    if (!there.length) return;
    if (there.length === 1) {
      const run = runs[there[0]];
      series.push({ label: run.name, color: color(bands ? g : there[0]), x: run.steps, y: run.columns[name] });
    } else {
      const label = `${runs[there[0]].name} and ${there.length - 1} more seeds: mean, lowest to highest`;
      series.push({ label, color: color(g), ...seedsTogether(runs, there, there.map((m) => runs[m].columns[name])) });
    }
  });
  return series;
}

// What the held-out scores are, which the metrics page explains as one family.
const SCORES = [
  [/^eval\/greedy$/, "Mean score of answers to held-out tasks, the likeliest token taken each time."],
  [/^eval\/mean$/, "Mean score of sampled answers to held-out tasks."],
  [/^eval\/pass@/, "Probability that one of so many sampled answers to a held-out task is right."],
  [/^eval\/maj@/, "Probability that the commonest of so many sampled answers is right."],
  [/^eval\/(truncated|unparsable|undecided)$/, "Share of all answers to held-out tasks."],
];

const ALL_OR_NOTHING = "Share of held-out tasks answered right, the likeliest token taken each time.";

function describe(data, name) {
  // A mean of scores that are all 0 or 1 is a share. With partial scores, or where that is not known, it is a mean.
  if (name === "eval/greedy" && data.runs.every((run) => run.binary)) return ["share", ALL_OR_NOTHING, ""];
  const score = SCORES.find(([pattern]) => pattern.test(name));
  if (score) return ["share", score[1], ""];
  const family = Object.keys(data.metrics).find((key) => key.endsWith("/") && name.startsWith(key));
  return data.metrics[name] || data.metrics[family] || ["", "", ""];
}

function curve(data, name, settings) {
  const [unit, text, healthy] = describe(data, name);
  const about = [text, unit && `unit: ${unit}`, healthy && healthy !== "-" && `healthy: ${healthy}`].filter(Boolean).join("\n");
  const series = seriesOf(data.runs, name, settings.bands);
  const stages = data.runs.length ? data.runs[0].stages : [];
  const marks = data.runs.flatMap((run) => run.health.filter((f) => f.reads.includes(name)).map((f) => ({ step: f.step, text: `${run.name}: ${f.message}` })));
  return lineChart(name, about, series, { stages, marks, smooth: settings.smooth, share: unit === "share", unit, log: settings.log });
}

// The value of a curve that never moves and that no monitor concerns: it needs no chart.
function constantOf(data, name) {
  const values = data.runs.flatMap((run) => (run.columns[name] || []).filter(known));
  const spoken = data.runs.some((run) => run.health.some((f) => f.reads.includes(name)));
  return values.length > 2 && !spoken && values.every((value) => value === values[0]) ? values[0] : null;
}

function curvesSection(data) {
  const settings = { smooth: 0, log: false, bands: experiments(data.runs).some((group) => group.length > 1) };
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.columns)))].sort();
  const scores = ["eval/greedy", "eval/pass@1", "eval/mean"].filter((name) => names.includes(name)).slice(0, 1);
  const extra = names.filter((name) => name.startsWith("reward/") && !["reward/mean", "reward/std", "reward/raised", "reward/undecided"].includes(name));
  const marks = { EVAL: scores, REWARDS: extra.length > 1 ? extra : [] };
  const groups = Object.entries(GROUPS).map(([title, members]) => [title, members.flatMap((name) => marks[name] || [name]).filter((name) => names.includes(name))]);
  const added = [];
  const constant = groups.flatMap(([, members]) => members).filter((name) => constantOf(data, name) !== null);
  const grid = make("div", {});
  const cards = (members) => make("div", { class: "grid" }, ...members.map((name) => curve(data, name, settings)));
  const redraw = () => {
    const open = new Map([...grid.querySelectorAll("details")].map((d) => [d.dataset.title, d.open]));
    const shown = groups.map(([title, members]) => [title, members.filter((name) => !constant.includes(name))]).filter(([, members]) => members.length);
    grid.replaceChildren(added.length ? cards(added) : "", ...shown.map(([title, members], i) => make("details", { "data-title": title, open: open.get(title) ?? i < OPEN },
      make("summary", {}, title), cards(members))),
    constant.length ? make("p", { class: "soft small", id: "constant" }, `the same at every step: ${constant.map((name) => `${name} ${show(constantOf(data, name))}`).join(", ")}`) : "");
  };
  const more = make("select", { "aria-label": "show another metric", onchange: () => {
    if (more.value && !added.includes(more.value)) added.unshift(more.value);
    more.value = "";
    redraw();
  } }, make("option", { value: "" }, "add a metric …"), ...names.map((name) => make("option", { value: name }, name)));
  // At most 0.95, an average over about 20 steps (1 / (1 - 0.95)); at 1 the curve would never move.
  const slider = make("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: 0, "aria-label": "smoothing", oninput: () => { settings.smooth = Number(slider.value); redraw(); } });
  const bands = make("input", { type: "checkbox", checked: settings.bands, onchange: () => { settings.bands = bands.checked; redraw(); } });
  const log = make("input", { type: "checkbox", onchange: () => { settings.log = log.checked; redraw(); } });
  redraw();
  return make("section", { id: "curves" }, make("h2", {}, "Curves"),
    make("div", { class: "controls" }, more, make("label", {}, "smoothing", slider),
      settings.bands ? make("label", {}, bands, "seeds as bands") : null,
      make("label", {}, log, "log scale"),
      make("span", { class: "soft small" }, "▾ marks where a monitor spoke")),
    grid);
}
