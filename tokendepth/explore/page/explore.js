// The page's state: a text, one or two runs, and the server's results for each of them.
import { html, render, useCallback, useEffect, useMemo, useRef, useState } from "./preact.js";
import { About, Detail, Legend, Passage } from "./parts.js";
import { saveHtml, saveSvg } from "./saving.js";
import { asked, columns, followed, sentence } from "./reading.js";

const TYPING_MS = 120; // pause in typing after which the text is sent
const LOOK_AGAIN_MS = 1000; // polls for budgets that are still being calibrated

function App() {
  const [runs, setRuns] = useState([]);
  const [fault, setFault] = useState("");
  const [text, setText] = useState(null);
  const [chosen, setChosen] = useState([0]);
  const views = useRef([]);

  const refresh = useCallback(async () => {
    try {
      const found = await asked("runs");
      setRuns(found);
      setFault("");
      setText((old) => (old === null ? found[0].sample : old));
      setChosen((old) => (old.length === 1 && old[0] === 0 && found.length > 1 && !runs.length ? [0, 1] : old));
    } catch (error) {
      setFault(error.message);
    }
  }, [runs.length]);
  useEffect(() => { refresh(); }, []);
  const coming = runs.some((run) => run.dial && run.dial.coming);
  useEffect(() => {
    if (!coming) return undefined;
    const timer = setInterval(refresh, LOOK_AGAIN_MS);
    return () => clearInterval(timer);
  }, [coming, refresh]);

  if (!runs.length) return html`<p role="status">${fault || "Loading…"}</p>`;
  const choose = (place, number) => setChosen((old) => {
    const next = old.slice();
    if (number < 0) next.length = 1;
    else next[place] = number;
    return next;
  });
  const saved = () => views.current.slice(0, chosen.length).filter((view) => view && view.result);
  const picker = (place, label, none) => html`<label>${label}
    <select id=${`run-${place + 1}`} value=${chosen[place] === undefined ? -1 : chosen[place]} onChange=${(e) => choose(place, Number(e.target.value))}>
      ${none && html`<option value="-1">${none}</option>`}
      ${runs.map((run, number) => html`<option value=${number}>${run.name}</option>`)}
    </select></label>`;

  return html`
    <header>
      <h1>Where does the depth go?</h1>
      <p class="quiet">Type or paste a text to see how deep the model goes for each token. The text is processed on
        this machine and not sent anywhere else.</p>
    </header>
    ${fault && html`<p class="alarm" role="alert">${fault}</p>`}
    <section class="entry">
      <label for="text">Text</label>
      <textarea id="text" rows="5" spellcheck="false" autocomplete="off" value=${text}
        onInput=${(e) => setText(e.target.value)}></textarea>
      <div class="controls">
        ${picker(0, "run ")}
        ${runs.length > 1 && picker(1, "compare with ", "no other run")}
        <span class="saving">save the view as
          <button type="button" id="save-html" onClick=${() => saveHtml(saved(), text)}>HTML</button>
          <button type="button" id="save-svg" onClick=${() => saveSvg(saved())}>SVG</button>
        </span>
      </div>
    </section>
    <main class=${chosen.length > 1 ? "panels two" : "panels"}>
      ${chosen.map((number, place) => html`<${Panel} key=${`${place}-${number}`} number=${number} run=${runs[number]}
        text=${text} setText=${setText} tell=${(view) => { views.current[place] = view; }} />`)}
    </main>`;
}

function Panel({ number, run, text, setText, tell }) {
  const executions = run.executions;
  const [execution, setExecution] = useState("sparse");
  const [point, setPoint] = useState(null); // null: the run's own
  const [row, setRow] = useState(-1); // router whose decisions colour the text; -1: all
  const [result, setResult] = useState(null);
  const [message, setMessage] = useState("");
  const [reading, setReading] = useState(false);
  const [place, setPlace] = useState(null);
  const [written, setWritten] = useState([]);
  const [writing, setWriting] = useState(false);
  const [length, setLength] = useState(100);
  const [temperature, setTemperature] = useState(0.8);
  const first = useRef(true);
  const pen = useRef(new AbortController()); // stops the generation

  useEffect(() => {
    const abort = new AbortController();
    pen.current.abort(); // the text or the budget has changed
    const timer = setTimeout(async () => {
      setReading(true);
      try {
        const found = await asked(`runs/${number}/look`, { text, execution, point }, abort.signal);
        setResult(found);
        setWritten([]);
        setMessage("");
      } catch (error) {
        if (error.name === "AbortError") return;
        setMessage(error.message);
      }
      setReading(false);
    }, first.current ? 0 : TYPING_MS);
    first.current = false;
    return () => { clearTimeout(timer); abort.abort(); };
  }, [number, text, execution, point]);
  useEffect(() => () => pen.current.abort(), []);

  const write = async () => {
    pen.current = new AbortController();
    const room = Math.min(Math.max(1, length), Math.max(1, Math.floor(run.context / 2)));
    setWriting(true);
    setWritten([]);
    setMessage("");
    try {
      await followed(`runs/${number}/v1/completions`, {
        model: run.name, prompt: result.ids.slice(-(run.context - room)), max_tokens: room, temperature,
        stream: true, depth: true, logprobs: 5, ...(point !== null && run.dial.writes ? { budget: point } : {}),
      }, pen.current.signal, setWritten);
    } catch (error) {
      if (error.name !== "AbortError") setMessage(error.message);
    }
    setWriting(false);
  };

  const view = useMemo(() => result && columns(result, written, row), [result, written, row]);
  tell({ run, result, written, row, point, view });
  const dial = run.dial;
  const value = dial && (point === null ? dial.own : point);
  return html`<section class="panel" aria-label=${run.name}>
    <h2>${run.name} <span class="quiet">${run.method}</span></h2>
    <div class="controls">
      <fieldset><legend>execution</legend>
        ${executions.map((name) => html`<label><input type="radio" name=${`execution-${number}`} value=${name}
          checked=${execution === name} onChange=${() => setExecution(name)} /> ${name}</label>`)}
      </fieldset>
      ${dial && html`<${Dial} dial=${dial} value=${value} set=${(next) => setPoint(next === dial.own ? null : next)} />`}
      ${run.routed && result && html`<label>colour by
        <select value=${row} onChange=${(e) => setRow(Number(e.target.value))}>
          <option value="-1">all routers</option>
          ${result.sites.map((site, n) => site.routed && html`<option value=${n}>${site.name}</option>`)}
        </select></label>`}
    </div>
    ${dial && dial.missing && html`<p class="quiet">Other budgets are not available: ${dial.missing}</p>`}
    ${message && html`<p class="alarm" role="alert">${message}</p>`}
    ${result && html`
      <p class="summary" role="status">${sentence(result, run, value)}${reading ? " …" : ""}</p>
      <div class=${message ? "stale" : ""}>
        <${Passage} view=${view} place=${place} setPlace=${setPlace} />
        <${Legend} view=${view} execution=${result.execution} routed=${run.routed} />
        <${Detail} view=${view} place=${place} execution=${result.execution} />
      </div>
      <div class="controls writing">
        <label>tokens <input type="number" min="1" max=${Math.floor(run.context / 2)} value=${length}
          onInput=${(e) => setLength(Number(e.target.value) || 1)} /></label>
        <label>temperature <input type="number" min="0" max="2" step="0.1" value=${temperature}
          onInput=${(e) => setTemperature(Math.min(2, Math.max(0, Number(e.target.value) || 0)))} /></label>
        ${writing
          ? html`<button type="button" class="stop" onClick=${() => pen.current.abort()}>Stop</button>`
          : html`<button type="button" class="go" onClick=${write}>Continue the text</button>`}
        ${written.length > 0 && !writing && html`<button type="button" class="keep"
          onClick=${() => setText(text + written.map((token) => token.text).join(""))}>Keep it</button>`}
        ${dial && !dial.writes && point !== null && html`<span class="quiet">Text is generated at the run's own
          ${` ${dial.name}`} of ${dial.own}.</span>`}
      </div>`}
    <${About} number=${number} />
  </section>`;
}

function Dial({ dial, value, set }) {
  const points = dial.points;
  const nearest = points.reduce((best, each, n) => (Math.abs(each - value) < Math.abs(points[best] - value) ? n : best), 0);
  return html`<label class="dial">${dial.name} <output>${value}</output>
    <input type="range" min="0" max=${points.length - 1} step="1" value=${nearest} aria-valuetext=${String(value)}
      onInput=${(e) => set(points[Number(e.target.value)])} />
    ${dial.coming > 0 && html`<span class="quiet">calibrating, ${dial.coming} left</span>`}
  </label>`;
}

render(html`<${App} />`, document.getElementById("app"), document.getElementById("app").firstElementChild);
