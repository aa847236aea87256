// What the page is made of: coloured tokens, their legend, what is known of one token, and a run's figures and tables.
import { html, useEffect, useMemo, useRef, useState } from "./preact.js";
import { asked } from "./reading.js";

const MANY_ROWS = 24; // of more routers than this the rows are thinner
export const rowHeight = (rows) => (rows > MANY_ROWS ? 3 : 5);

const shade = (value) => `rgb(var(--active) / calc(var(--strength) * ${value}))`;

// The rows of one token as one background, a stripe for each router, so that a long text stays one element a token.
export function stripes(work) {
  const height = rowHeight(work.length);
  const stops = work.map((value, n) => `${shade(value)} ${n * height}px ${(n + 1) * height - 1}px, transparent 0 ${(n + 1) * height}px`);
  return `linear-gradient(to bottom, ${stops.join(", ")})`;
}

export const visible = (piece) => piece || "∅";
const marked = (piece) => visible(piece.replace(/ /g, "·")); // alone, a space would not be seen

export function Passage({ view, place, setPlace }) {
  const box = useRef(null);
  const last = view.tokens.length - 1;
  const tokens = useMemo(() => view.tokens.map((token, t) => Token(token, t, view.rows.length)), [view]);
  useEffect(() => {
    const chosen = place === null ? null : box.current.querySelector(`[data-place="${place}"]`);
    if (!chosen) return undefined;
    chosen.classList.add("chosen");
    return () => chosen.classList.remove("chosen");
  }, [place, tokens]);
  const at = (event) => {
    const found = event.target.closest("[data-place]");
    if (found) setPlace(Number(found.dataset.place));
  };
  const move = (event) => {
    const here = place === null ? -1 : place;
    const next = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    setPlace(Math.min(last, Math.max(0, next)));
  };
  return html`<div class="passage" ref=${box} tabindex="0" role="group" onMouseOver=${at} onClick=${at} onKeyDown=${move}
    aria-label="Tokens, coloured by depth; arrow keys move from one to the next">${tokens}</div>`;
}

function Token(token, t, rows) {
  const known = token.work !== null;
  const classes = ["token", token.written && "written", token.starts && "starts", !known && "unread"];
  const height = `${rows * rowHeight(rows)}px`;
  return [
    html`<span class=${classes.filter(Boolean).join(" ")} data-place=${t} key=${t}>
      <b style=${known ? { background: shade(token.depth) } : {}}>${visible(token.piece)}</b>
      ${rows > 0 && html`<i style=${{ height, backgroundImage: known ? stripes(token.work) : "none" }}></i>`}
    </span>`,
    token.piece.endsWith("↵") && html`<br key=${`${t}-end`} />`,
  ];
}

export function Legend({ view, execution, routed }) {
  if (!routed) return html`<p class="legend quiet">This run has no routers: every token passes every layer.</p>`;
  const rows = view.rows;
  const names = rows.length > 3 ? `${rows[0]}, ${rows[1]}, … ${rows[rows.length - 1]}` : rows.join(", ");
  const [none, all] = execution === "soft" ? ["gate 0", "gate 1"] : ["skipped", "worked on"];
  return html`<p class="legend quiet">
    <span class="scale" aria-hidden="true">${[0, 0.25, 0.5, 0.75, 1].map((value) => html`<i style=${{ background: shade(value) }}></i>`)}</span>
    ${none} to ${all}${rows.length > 1 && view.row < 0 ? " by all routers" : ""}. Rows below the text, from the top:
    ${` ${names}`}.${view.tokens.some((token) => token.starts) ? " A bar: the model begins to read anew." : ""}
    ${view.tokens.some((token) => token.written) ? " Underlined: written by the model." : ""}
  </p>`;
}

export function Detail({ view, place, execution }) {
  const token = place === null ? null : view.tokens[place];
  if (!token) return html`<div class="detail quiet" aria-live="polite">Point at a token, or press an arrow key there.</div>`;
  const soft = execution === "soft" && !token.written;
  return html`<div class="detail" aria-live="polite">
    <p><code>${marked(token.piece)}</code> token ${place + 1}${token.surprisal === null ? ", the first: nothing is before it"
      : `, surprisal ${token.surprisal.toFixed(2)} nats`}${token.work ? "" : "; not read by the model yet"}</p>
    ${token.work && view.rows.length > 0 && html`<dl class="routers">${view.rows.map((name, n) => html`<div>
      <dt>${name}</dt><dd><i style=${{ background: shade(token.work[n]) }}></i> ${soft ? token.work[n].toFixed(2)
        : token.work[n] >= 0.5 ? "worked on" : "skipped"}</dd></div>`)}</dl>`}
    ${token.expected && html`<p class="quiet">Expected here:</p><ol class="expected">${token.expected.map(([piece, share]) =>
      html`<li><code>${marked(piece)}</code> <meter min="0" max="1" value=${share}></meter> ${(100 * share).toFixed(1)}%</li>`)}</ol>`}
  </div>`;
}

export function About({ number }) {
  const [open, setOpen] = useState(false);
  const [found, setFound] = useState(null);
  const [message, setMessage] = useState("");
  useEffect(() => {
    if (!open) return;
    asked(`runs/${number}/about`).then((tree) => { setFound(tree); setMessage(""); }, (error) => setMessage(error.message));
  }, [open, number]);
  return html`<details class="about" onToggle=${(event) => setOpen(event.target.open)}>
    <summary>This run's curves and tables</summary>
    ${message && html`<p class="alarm" role="alert">${message}</p>`}
    ${open && found && html`
      <p>${found.sentence}</p>
      ${["", "soft", "executed"].map((group) => html`<${Cells} title=${group} cells=${found.cells.filter((cell) => cell.group === group)} />`)}
      <ul class="quiet">${found.notes.map((note) => html`<li>${note}</li>`)}</ul>
      ${found.figures.map((figure) => html`<${Chart} figure=${figure} />`)}`}
  </details>`;
}

const TITLES = { "": "", soft: "soft: a weighting, nothing is skipped", executed: "executed" };

function Cells({ title, cells }) {
  if (!cells.length) return null;
  return html`<section class=${`cells ${title}`}>${title && html`<h3>${TITLES[title]}</h3>`}
    <dl>${cells.map((cell) => html`<div><dt>${cell.title}</dt><dd>${cell.value}</dd></div>`)}</dl></section>`;
}

function Chart({ figure }) {
  const box = useRef(null);
  useEffect(() => {
    const { uPlot } = window;
    const style = getComputedStyle(box.current);
    const colours = ["--line-1", "--line-2"].map((name) => style.getPropertyValue(name).trim());
    const ink = style.getPropertyValue("--quiet").trim();
    const grid = { stroke: style.getPropertyValue("--line").trim(), width: 1 };
    const axis = { stroke: ink, grid, ticks: grid };
    const data = uPlot.join(figure.lines.map((line) => [line.points.map((p) => p[0]), line.points.map((p) => p[1])]));
    const chart = new uPlot({
      width: box.current.clientWidth, height: 220, title: "", scales: { x: { time: false } },
      axes: [{ ...axis, label: figure.x, labelSize: 20 }, axis],
      series: [{ label: figure.x }, ...figure.lines.map((line, n) => ({
        label: line.name, stroke: colours[n], width: 2, spanGaps: true, dash: n ? [] : [4, 3],
        points: { show: line.points.length < 40 },
      }))],
    }, data, box.current);
    const resized = new ResizeObserver(() => chart.setSize({ width: box.current.clientWidth, height: 220 }));
    resized.observe(box.current);
    return () => { resized.disconnect(); chart.destroy(); };
  }, [figure]);
  return html`<figure><figcaption>${figure.title}</figcaption><div class="chart" ref=${box}></div></figure>`;
}
