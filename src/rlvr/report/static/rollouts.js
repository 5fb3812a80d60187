// The browser of rollouts: filters, a list, and one rollout with its tokens in colours.

// Items of the list that are in the document at once; thousands would make each search slow.
const PAGE = 150;
const PAINTS = { none: "no colours", advantage: "advantage", log_ratio: "log-prob ratio", surprise: "surprise" };

function rolloutsSection(data) {
  const section = make("section", { id: "rollouts" }, make("h2", {}, "Rollouts"));
  section.append(make("p", { class: "soft small", id: "left-out" }, data.notes.join(". ") || "no rollouts were recorded"));
  if (!data.rollouts.length) return section;
  const state = { shown: PAGE, chosen: 0, paint: "surprise", found: [] };
  const linked = decodeURIComponent(location.hash.replace(/^#rollout=/, ""));
  const statuses = [...new Set(data.rollouts.map((r) => r.status))].sort();
  const steps = [...new Set(data.rollouts.map((r) => r.step))].sort((a, b) => a - b);
  const choice = (id, label, options) => make("select", { id, "aria-label": label, onchange: () => search() }, ...options.map(([value, text]) => make("option", { value }, text)));
  const number = (id, label) => make("input", { id, type: "number", step: "any", placeholder: label, "aria-label": label, oninput: () => search() });
  const filters = {
    run: choice("f-run", "run", [["", "all runs"], ...data.runs.map((run, i) => [i, run.name])]),
    step: choice("f-step", "step", [["", "all steps"], ...steps.map((s) => [s, `step ${s}`])]),
    status: choice("f-verdict", "verdict", [["", "all verdicts"], ...statuses.map((s) => [s, s])]),
    least: number("f-least", "reward ≥"), most: number("f-most", "reward ≤"),
    text: make("input", { id: "f-task", type: "search", placeholder: "task or text", "aria-label": "task or text", oninput: () => search() }),
    order: choice("f-order", "order", [["-step", "newest first"], ["", "oldest first"], ["reward", "highest reward"], ["-reward", "lowest reward"], ["tokens", "longest"], ["-tokens", "shortest"]]),
  };
  const count = make("span", { class: "soft small", id: "count" });
  const list = make("div", { class: "card list", role: "listbox", "aria-label": "rollouts" });
  const detail = make("div", { class: "card detail", id: "detail" });

  function search() {
    const text = filters.text.value.toLowerCase(), least = parseFloat(filters.least.value), most = parseFloat(filters.most.value);
    state.found = data.rollouts.filter((r) =>
      (filters.run.value === "" || r.run === Number(filters.run.value))
      && (filters.step.value === "" || r.step === Number(filters.step.value))
      && (filters.status.value === "" || r.status === filters.status.value)
      && (Number.isNaN(least) || (known(r.reward) && r.reward >= least))
      && (Number.isNaN(most) || (known(r.reward) && r.reward <= most))
      && (!text || r.task.toLowerCase().includes(text) || r.text.toLowerCase().includes(text) || data.prompts[r.prompt].toLowerCase().includes(text)));
    const by = filters.order.value;
    if (by) {
      const key = by.replace("-", ""), sign = by === "-step" ? -1 : by.startsWith("-") ? 1 : -1;
      // Unknown values last, whatever the order.
      state.found = [...state.found].sort((a, b) => known(a[key]) - known(b[key]) ? known(b[key]) - known(a[key]) : sign * (a[key] - b[key]));
    }
    Object.assign(state, { shown: PAGE, chosen: 0 });
    update(false);
  }

  function update(link = true) {
    count.textContent = `${state.found.length} of ${data.rollouts.length} shown rollouts match`;
    list.replaceChildren(...state.found.slice(0, state.shown).map((r, i) => item(r, i)));
    if (state.found.length > state.shown) {
      list.append(make("button", { type: "button", style: "margin:10px", onclick: () => { state.shown += PAGE; update(); } }, "more"));
    }
    look(link);
  }

  function item(r, i) {
    const button = make("button", { class: "item", type: "button", role: "option", "aria-selected": String(i === state.chosen), onclick: () => {
      list.querySelector('[aria-selected="true"]')?.setAttribute("aria-selected", "false");
      button.setAttribute("aria-selected", "true");
      state.chosen = i;
      look();
    } },
    make("i", { class: "dot", style: `background:${verdictColor(r.status)};margin:0`, title: r.status }),
    make("span", { class: "where" }, `${data.runs.length > 1 ? `${data.runs[r.run].name} · ` : ""}step ${r.step} · ${r.task} #${r.member}`),
    make("span", { class: "soft" }, known(r.reward) ? show(r.reward) : r.stop === "given" ? "demonstration" : "undecided"),
    make("span", { class: "snip" }, r.text.trim().slice(-160) || "(empty)"));
    return button;
  }

  // Shows a rollout that may be beyond the filters, as the link to it or a member of the group.
  function open(r) {
    for (const filter of Object.values(filters)) if (filter !== filters.order) filter.value = "";
    search();
    state.chosen = state.found.indexOf(r);
    state.shown = Math.max(PAGE, state.chosen + 1);
    update();
  }

  function look(link = true) {
    const r = state.found[state.chosen];
    if (r && link) history.replaceState(null, "", `#rollout=${encodeURIComponent(nameOf(data, r))}`);
    detail.replaceChildren(...(r ? rollout(data, r, state, look, open) : [make("p", { class: "soft" }, "no rollout matches")]));
    detail.scrollTop = 0;
  }

  section.append(make("div", { class: "controls" }, data.runs.length > 1 ? filters.run : null, filters.step, filters.status, filters.least, filters.most, filters.text, filters.order, count),
    make("div", { class: "browser" }, list, detail));
  search();
  const target = data.rollouts.find((r) => nameOf(data, r) === linked);
  if (target) { open(target); setTimeout(() => section.scrollIntoView()); }
  return section;
}

// What a link names a rollout by: the run, the step, the group and the member.
function nameOf(data, r) {
  return `${data.runs[r.run].name}/${r.step}/${r.group}/${r.member}`;
}

// The rollouts of one group side by side, with their verdicts: what the advantage compares.
function siblings(data, r, open) {
  const members = data.rollouts.filter((other) => other.run === r.run && other.step === r.step && other.group === r.group);
  if (members.length < 2) return null;
  return make("div", {}, make("h3", {}, `The group: ${members.length} completions of this prompt`),
    make("div", { class: "siblings" }, ...members.map((other) => make("button", { type: "button", class: "sibling", "aria-current": String(other === r), onclick: () => open(other) },
      make("span", { class: "badge", style: `background:${verdictColor(other.status)}` }, other.status), ` #${other.member} · ${show(other.reward)}`,
      make("span", { class: "tail" }, other.text.trim().slice(-240) || "(empty)")))));
}

function rollout(data, r, state, look, open) {
  const paints = Object.keys(PAINTS).filter((p) => p === "none" || (r.ends && valuesOf(r, p)));
  const paint = paints.includes(state.paint) ? state.paint : paints[paints.length - 1];
  const painter = make("select", { id: "paint", "aria-label": "colours", onchange: () => { state.paint = painter.value; look(); } },
    ...paints.map((p) => make("option", { value: p, selected: p === paint }, PAINTS[p])));
  const badge = make("span", { class: "badge", style: `background:${verdictColor(r.status)}` }, r.status);
  const terms = Object.entries(r.columns || {}).map(([name, value]) => `${name} ${show(value)}`).join(" · ");
  const others = r.verdicts ? Object.entries(r.verdicts).map(([name, v]) => make("div", { class: "small" }, `${name}: ${v[0]}, score ${show(v[1])} ${v[2] || ""}`)) : [];
  return [
    make("div", { class: "controls" }, badge, make("b", {}, r.task), make("span", { class: "soft" }, `step ${r.step} · group ${r.group} · member ${r.member} · ${r.tokens} tokens · stopped: ${r.stop}`)),
    make("div", { class: "facts small" }, fact("reward", show(r.reward)), fact("score", show(r.score)), fact("advantage", show(r.advantage)), fact("answer", show(r.answer)), fact("gold", show(r.gold))),
    r.reason ? make("p", { id: "reason" }, make("span", { class: "soft" }, "verdict: "), r.reason) : null, ...others,
    terms ? make("p", { class: "soft small" }, terms) : null,
    make("h3", {}, "Prompt"), make("pre", {}, data.prompts[r.prompt]),
    make("div", { class: "controls", style: "margin-bottom:0" }, make("h3", {}, "Completion"), paints.length > 1 ? make("label", {}, "colours", painter) : make("span", { class: "soft small" }, "no token colours: nothing was sampled, the run has saved no tokenizer yet, or the text is long")),
    make("pre", { id: "completion" }, ...completion(r, paint)), paint === "none" ? null : scale(r, paint),
    siblings(data, r, open),
  ].filter(Boolean);
}

const fact = (name, value) => make("span", {}, make("b", {}, value), make("span", { class: "soft" }, name));

function valuesOf(r, paint) {
  if (paint === "advantage") return r.token_advantage || (known(r.advantage) ? r.ends.map(() => 1000 * r.advantage) : null);
  if (paint === "log_ratio") return r.token_log_ratio || null;
  if (paint === "surprise") return r.logprob && r.logprob.some(known) ? r.logprob.map((v) => (known(v) ? -v : null)) : null;
  return null;
}

function completion(r, paint) {
  if (paint === "none" || !r.ends) return [r.text || "(empty)"];
  const values = valuesOf(r, paint), most = largest(values, paint);
  const nodes = [];
  let at = 0;
  r.ends.forEach((end, t) => {
    if (end <= at) return;
    const value = values[t], strength = known(value) ? Math.min(Math.abs(value) / most, 1) : 0;
    // A third kind of colour for surprise, which has no sign.
    const hue = paint === "surprise" ? "--warm" : value >= 0 ? "--plus" : "--minus";
    const about = `token ${t + 1}: ${known(value) ? `${PAINTS[paint]} ${show(value / 1000)}` : `${PAINTS[paint]} not known`}` + (known(r.logprob?.[t]) ? `\nsampled with probability ${show(Math.exp(r.logprob[t] / 1000))}` : "");
    // Opacity from 0.06 to 0.66; below a fiftieth of the largest value a token has no colour.
    nodes.push(make("span", { class: "token", style: strength > 0.02 ? `background:rgba(var(${hue}),${(0.06 + 0.6 * strength).toFixed(2)})` : null,
      onpointermove: (event) => tip.show(event, about), onpointerleave: tip.hide }, r.text.slice(at, end)));
    at = end;
  });
  if (at < r.text.length) nodes.push(r.text.slice(at));
  return nodes.length ? nodes : [r.text || "(empty)"];
}

function largest(values, paint) {
  const most = Math.max(...values.filter(known).map(Math.abs), 0);
  // In thousandths: an advantage of 1, a log-ratio of 0.05 (a ratio of 1.05), 1 nat of surprise.
  return Math.max(most, { advantage: 1000, log_ratio: 50, surprise: 1000 }[paint]);  // less than this is no more than a tint
}

function scale(r, paint) {
  const most = show(largest(valuesOf(r, paint), paint) / 1000);
  const parts = paint === "surprise" ? [{ label: `surprise up to ${most} nats`, color: "rgba(var(--warm),.66)" }]
    : [{ label: `positive, up to ${most}`, color: "rgba(var(--plus),.66)" }, { label: `negative, down to −${most}`, color: "rgba(var(--minus),.66)" }];
  return legend(parts);
}
