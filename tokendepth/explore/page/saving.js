// Save the view as one self-contained file: a page without scripts, or an SVG picture.
import { rowHeight, visible } from "./parts.js";
import { sentence } from "./reading.js";

const SVG = "http://www.w3.org/2000/svg";
const [INK, QUIET, ACTIVE, SKIPPED] = ["#1c2733", "#566372", "#159a92", "#8c99a638"];
const [CHARACTER, LINE, COLUMNS, MARGIN] = [8.5, 19, 100, 16];

export async function saveHtml(views, text) {
  const style = await (await fetch("explore.css")).text();
  const page = document.implementation.createHTMLDocument("tokendepth explore");
  const add = (parent, name, words) => {
    const element = page.createElement(name);
    if (words !== undefined) element.textContent = words;
    parent.append(element);
    return element;
  };
  page.documentElement.lang = "en";
  add(page.head, "meta").setAttribute("charset", "utf-8");
  const phone = add(page.head, "meta");
  phone.name = "viewport";
  phone.content = "width=device-width, initial-scale=1";
  add(page.body, "h1", "Where does the depth go?");
  const panels = add(page.body, "main");
  panels.className = views.length > 1 ? "panels two" : "panels";
  const shown = document.querySelectorAll("main .panel");
  views.forEach((view, n) => {
    const panel = add(panels, "section");
    panel.className = "panel";
    add(panel, "h2", `${view.run.name} (${view.run.method})`);
    add(panel, "p", said(view)).className = "summary";
    for (const part of shown[n].querySelectorAll(".passage, .legend")) panel.append(page.importNode(part, true));
    panel.querySelector(".passage").removeAttribute("tabindex");
    panel.querySelectorAll("[data-place]").forEach((token) => {
      token.classList.remove("chosen");
      token.title = tip(view.view.tokens[Number(token.dataset.place)], view.view.rows);
    });
  });
  add(page.body, "h2", "The text");
  add(page.body, "pre", text).className = "text";
  const whole = page.documentElement.outerHTML.replace("</head>", () => `<style>${style}</style></head>`);
  download("depth.html", "text/html", `<!doctype html>\n${whole}\n`);
}

function said(view) {
  const value = view.run.dial && (view.point === null ? view.run.dial.own : view.point);
  return sentence(view.result, view.run, value);
}

function tip(token, rows) {
  const lines = [`${visible(token.piece)}  ${token.surprisal === null ? "" : `surprisal ${token.surprisal.toFixed(2)} nats`}`];
  if (token.work) rows.forEach((name, n) => lines.push(`${name}: ${token.work[n]}`));
  return lines.join("\n");
}

export function saveSvg(views) {
  const picture = document.createElementNS(SVG, "svg");
  const width = MARGIN * 2 + COLUMNS * CHARACTER;
  let top = MARGIN;
  const add = (name, attributes, words) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (words !== undefined) element.textContent = printable(words);
    picture.append(element);
    return element;
  };
  const write = (x, y, words, attributes) => add("text", {
    x, y, "font-family": "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace", "font-size": 14, fill: INK,
    "xml:space": "preserve", ...attributes,
  }, words);
  const box = (x, y, wide, high, fill, opacity) => add("rect", { x, y, width: wide, height: high, fill, "fill-opacity": opacity });
  for (const view of views) {
    const { tokens, rows } = view.view;
    const [high, block] = [rowHeight(rows.length), LINE + rows.length * rowHeight(rows.length) + 8];
    write(MARGIN, (top += 16), `${view.run.name} (${view.run.method})`, { "font-weight": 700 });
    for (const line of wrapped(said(view))) write(MARGIN, (top += 17), line, { "font-size": 12, fill: QUIET });
    top += 12;
    let column = 0;
    for (const token of tokens) {
      const piece = visible(token.piece);
      const size = Math.max(1, [...piece].length);
      if (column && column + size > COLUMNS) { column = 0; top += block; }
      const x = MARGIN + column * CHARACTER;
      box(x, top, size * CHARACTER, LINE, token.work ? ACTIVE : "none", 0.72 * (token.depth || 0));
      write(x, top + 14, piece);
      if (token.work) token.work.forEach((value, n) => {
        box(x, top + LINE + n * high, size * CHARACTER, high - 1, SKIPPED, 1);
        if (value) box(x, top + LINE + n * high, size * CHARACTER, high - 1, ACTIVE, 0.72 * value);
      });
      column += size;
      if (piece.endsWith("↵")) { column = 0; top += block; }
    }
    top += column ? block : 0;
    write(MARGIN, (top += 14), `rows, from top to bottom: ${rows.join(", ") || "none"}`, { "font-size": 12, fill: QUIET });
    top += 24;
  }
  for (const [key, value] of Object.entries({ viewBox: `0 0 ${width} ${top}`, width, height: top })) picture.setAttribute(key, value);
  const paper = box(0, 0, width, top, "#ffffff", 1);
  picture.prepend(paper);
  download("depth.svg", "image/svg+xml", `${new XMLSerializer().serializeToString(picture)}\n`);
}

function wrapped(words) {
  const lines = [""];
  for (const word of words.split(" ")) {
    if (lines[lines.length - 1].length + word.length > 110) lines.push("");
    lines[lines.length - 1] += `${word} `;
  }
  return lines;
}

// XML does not allow control characters or unpaired surrogates.
const printable = (words) => words.replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]|\p{Surrogate}/gu, "▯");

function download(name, type, content) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
