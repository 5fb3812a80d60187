// The sections of the page, in order.

const GUIDE = [
  "The reward is what training makes larger. The held-out score, on tasks that training never sees, says whether that means anything: it should rise too. Compare it with its value before training.",
  "Only groups with right and wrong answers teach (group/mixed). Many groups all wrong: the tasks are too hard, or the answers are not found (verdict/unparsable). Many all right: there is nothing left to learn.",
  "If a curve looks odd, read rollouts below: filter by verdict and step, see what was asked, written and found, and why it got its score.",
];

function guide() {
  return make("details", { id: "guide", open: true }, make("summary", {}, "How to read this page"), ...GUIDE.map((text) => make("p", {}, text)));
}

// The first evaluation, and the last of each stage.
function milestones(evaluations) {
  const ends = new Map();
  evaluations.slice(1).forEach((e) => ends.set(e.stage || "training", e));
  return [...evaluations.slice(0, 1).map((e) => [e.step === 0 ? "start" : `step ${e.step}`, e]), ...[...ends].map(([stage, e]) => [`after ${stage}`, e])];
}

// One sentence and one wide curve with its intervals: what was learned; then what it ran on.
function hero(run, number) {
  const [x, y, low, high] = [0, 1, 2, 3].map((k) => run.points.map((point) => point[k]));
  const about = `held-out score ${(run.score || "").slice(5)}, with 95 % intervals over tasks`;
  const chart = run.points.length > 1
    ? lineChart("", about, [{ label: (run.score || "").slice(5), color: color(number), x, y, low, high }], { stages: run.stages, share: true, wide: innerWidth < 700 ? WIDE : WIDEST })
    : null;
  const rows = run.facts.map(([name, value]) => make("tr", {}, make("th", {}, name), make("td", { class: "text" }, value)));
  const light = run.health.length ? `${run.health.length} finding${run.health.length > 1 ? "s" : ""}, see Health` : "No problems found";
  return make("div", { class: "card hero" }, make("p", { class: "headline" }, run.headline),
    make("p", { class: run.health.length ? "light warned" : "light" }, run.health.length ? "! " : "✓ ", light), chart,
    rows.length ? make("details", { open: innerWidth > 900 }, make("summary", {}, "model, data, machine, versions, command"), make("div", { class: "scroll" }, make("table", { class: "about" }, make("tbody", {}, ...rows)))) : null);
}

function runsSection(data) {
  const cards = data.runs.map((run, number) => {
    const last = (name) => (run.columns[name] || []).filter(known).slice(-1)[0];
    const score = ["eval/greedy", "eval/pass@1", "eval/mean"].find((name) => run.evaluations.some((e) => known(e[name])));
    const scores = score ? milestones(run.evaluations.filter((e) => known(e[score]))) : [];
    const facts = [fact("steps", show(run.last_step)), fact("in training steps", duration(run.seconds))];
    if (last("reward/mean") !== undefined) facts.push(fact("reward, last step", brief(last("reward/mean"))));
    if (scores.length) facts.push(fact(`${score.slice(5)}, held out${scores.length > 1 ? `: ${scores.map(([when]) => when).join(", ")}` : ""}`, scores.map(([, e]) => percent(e[score])).join(" → ")));
    const heading = make("h3", {}, make("i", { class: "dot", style: `background:${color(number)}` }), run.name, run.seed === null ? null : make("span", { class: "soft" }, ` · seed ${run.seed}`));
    return make("div", { class: "card" }, heading, make("div", { class: "facts" }, ...facts), ...run.notes.map((note) => make("p", { class: "soft small note" }, note)));
  });
  return make("section", { id: "runs" }, make("h2", {}, data.runs.length > 1 ? "Runs" : "Run"), 
    data.runs.length === 1 ? hero(data.runs[0], 0) : null, make("div", { class: "runs" }, ...cards), guide());
}

function healthSection(data) {
  const section = make("section", { id: "health" }, make("h2", {}, "Health"));
  data.runs.forEach((run) => {
    if (data.runs.length > 1) section.append(make("h3", { style: "margin:8px 0 6px" }, run.name));
    if (!run.health.length) section.append(make("p", { class: "fine" }, "✓ ", `No problems found (${data.checks} checks)`));
    run.health.forEach((f) => section.append(make("div", { class: "finding" },
      make("div", {}, make("b", {}, f.monitor.replaceAll("_", " ")), make("span", { class: "soft" }, ` · step ${f.step}${f.since < f.step ? `, since step ${f.since}` : ""}${f.mode === "stop" ? " · the run was stopped" : ""}`)),
      make("div", {}, ...prose(f.message)), make("div", { class: "try" }, "Try: ", ...prose(f.advice)),
      f.examples.length ? make("ul", { class: "small" }, ...f.examples.map((text) => make("li", {}, text))) : null)));
  });
  return section;
}

function table(columns, rows) {
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...columns.map((c) => make("th", {}, c)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, brief(cell))))))));
}

function evaluationsSection(data) {
  if (!data.runs.some((run) => run.evaluations.length)) return null;
  const section = make("section", { id: "evaluations" }, make("h2", {}, "Evaluations"));
  data.runs.forEach((run) => {
    if (!run.evaluations.length) return;
    // Where every score is 0 or 1, mean and pass@1 are one column.
    const same = run.evaluations.every((e) => e["eval/mean"] === e["eval/pass@1"]);
    const names = [...new Set(run.evaluations.flatMap((e) => Object.keys(e)))].filter((name) => name.startsWith("eval/") && !(same && name === "eval/mean"));
    const bounds = new Map(run.points.map(([step, , low, high]) => [step, known(low) ? ` (${(100 * low).toFixed(1)} to ${(100 * high).toFixed(1)})` : ""]));
    const cell = (e, name) => (describe(data, name)[0] === "share" ? percent(e[name]) : brief(e[name])) + (name === run.score ? bounds.get(e.step) || "" : "");
    const rows = run.evaluations.map((e) => [`${e.stage ? `${e.stage}, ` : ""}step ${e.step}`, ...names.map((name) => cell(e, name))]);
    section.append(make("div", { class: "card", style: "margin-bottom:10px" }, data.runs.length > 1 ? make("h3", {}, run.name) : null, table(["", ...names.map((name) => name.slice(5))], rows)));
  });
  return section;
}

function overTimeSection(data) {
  const section = make("section", { id: "over-time" }, make("h2", {}, "Over time"));
  data.runs.forEach((run, number) => {
    if (!run.steps.length) return;
    const suffix = data.runs.length > 1 ? `: ${run.name}` : "";
    const parts = (names, prefix, paint) => names.filter((name) => (run.columns[prefix + name] || []).some((v) => v))
      .map((name, i) => ({ label: name, color: paint(name, i), y: run.columns[prefix + name] }));
    const verdicts = parts(Object.keys(VERDICTS), "verdict/", (name) => verdictColor(name));
    const phases = parts(["rollout", "verify", "score", "update", "publish", "unaccounted"], "time/", (_, i) => color(i));
    section.append(make("div", { class: "four" },
      stackChart(`verdicts${suffix}`, "Share of the rollouts by verdict", run.steps, verdicts, { whole: true }),
      stackChart(`seconds by phase${suffix}`, "Where the wall clock of each step went", run.steps, phases),
      histogramChart(`completion length in tokens${suffix}`, "Each column adds up to its steps' rollouts", run.lengths, color(number)),
      histogramChart(`reward${suffix}`, "Each column adds up to its steps' rollouts", run.rewards, color(number))));
  });
  return section;
}

function configSection(data) {
  const section = make("section", { id: "config" }, make("h2", {}, "Configuration"));
  if (data.runs.length > 1) {
    section.append(data.differences.length
      ? make("div", { class: "card scroll" }, make("table", { id: "differences" }, make("thead", {}, make("tr", {}, make("th", { class: "text" }, "what differs"), ...data.runs.map((run) => make("th", { class: "text" }, run.name)))),
        make("tbody", {}, ...data.differences.map((row) => make("tr", {}, make("td", { class: "text" }, row.key), ...row.values.map((v) => make("td", { class: "text" }, v || "–")))))))
      : make("p", { class: "soft" }, "The configurations do not differ."));
  }
  data.runs.forEach((run) => run.config.length && section.append(make("details", { style: "margin-top:8px" }, make("summary", {}, `all settings of ${run.name}`),
    make("div", { class: "card scroll" }, make("table", {}, make("tbody", {}, ...run.config.map(([key, value]) => make("tr", {}, make("td", {}, key), make("td", { class: "text" }, value)))))))));
  return section;
}

async function main() {
  setUpTheme();
  const data = await unpack();
  const title = data.runs.map((run) => run.name).join(", ");
  document.title = `${title} · rlvr report`;
  document.getElementById("title").textContent = title;
  const sections = [runsSection, healthSection, curvesSection, evaluationsSection, overTimeSection, rolloutsSection, configSection]
    .map((build) => build(data)).filter(Boolean);
  document.getElementById("main").replaceChildren(...sections, make("p", { class: "soft small" }, `written ${data.made} by rlvr`));
  document.getElementById("nav").replaceChildren(...sections.map((s) => make("a", { href: `#${s.id}` }, s.querySelector("h2").textContent)));
  document.body.dataset.ready = "yes";
}

main().catch((error) => {
  document.getElementById("main").replaceChildren(make("p", {}, `This page could not be drawn: ${error.message}`));
  throw error;
});
