// Requests to the server, and its results as columns: one per token, with a value for each router.

export async function asked(address, body, signal) {
  let answer;
  try {
    answer = await fetch(address, body === undefined ? { signal } : {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not respond; start it again: tokendepth explore RUN");
  }
  if (!answer.ok) throw new Error(await complaint(answer));
  return answer.json();
}

async function complaint(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The server returned status ${answer.status}.`;
  }
}

// Reads a stream of tokens. Each comes with the work at the position that predicted it, so a token's own work comes
// with the next one.
export async function followed(address, body, signal, tell) {
  const answer = await fetch(address, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
  });
  if (!answer.ok) throw new Error(await complaint(answer));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  const tokens = [];
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") continue;
      const tree = JSON.parse(data);
      if (tree.error) throw new Error(tree.error.message);
      for (const choice of tree.choices) add(tokens, choice);
    }
    tell(tokens.slice());
  }
}

function add(tokens, choice) {
  choice.depth.tokens.forEach((depth, n) => {
    if (tokens.length) tokens[tokens.length - 1].work = depth.work;
    const likeliest = Object.entries(choice.logprobs.top_logprobs[n]).map(([piece, log]) => [spelled(piece), Math.exp(log)]);
    tokens.push({
      text: choice.text, piece: spelled(choice.logprobs.tokens[n]), work: null,
      surprisal: -choice.logprobs.token_logprobs[n],
      expected: likeliest.sort((a, b) => b[1] - a[1]).slice(0, 5),
    });
  });
}

const spelled = (piece) => piece.replace(/\n/g, "↵");

// One column for each token of the text and of its generated continuation.
export function columns(result, written, row) {
  const routed = result.sites.map((site, n) => (site.routed ? n : -1)).filter((n) => n >= 0);
  const tokens = result.pieces.map((piece, t) => ({
    piece, starts: t > 0 && t % result.window === 0, written: false, surprisal: result.surprisal[t],
    expected: t ? result.expected[t - 1] : null, work: routed.map((n) => result.work[n][t]),
  }));
  for (const token of written) {
    tokens.push({ ...token, starts: false, written: true, work: token.work && routed.map((n) => token.work[n]) });
  }
  const shownRow = routed.indexOf(row);
  for (const token of tokens) {
    if (!token.work) token.depth = null;
    else if (!routed.length) token.depth = 1;
    else if (shownRow >= 0) token.depth = token.work[shownRow];
    else token.depth = token.work.reduce((sum, value) => sum + value, 0) / routed.length;
  }
  return { tokens, rows: routed.map((n) => result.sites[n].name), row: shownRow };
}

export const percent = (share) => `${(100 * share).toFixed(1)}%`;

export function sentence(result, run, value) {
  const parts = [`${result.execution}${run.dial ? `, ${run.dial.name} ${value}` : ""}: ${result.pieces.length.toLocaleString("en")} tokens`];
  if (!run.routed) parts.push("no routers: every token goes through every layer");
  else if (result.execution === "soft") parts.push(`mean gate ${result.active_fraction.toFixed(3)}, nothing is skipped`);
  else parts.push(`active fraction ${percent(result.active_fraction)}`);
  if (result.flops_skipped !== null && run.routed) {
    const skipped = result.flops_skipped;
    parts.push(skipped < 0 ? `${percent(-skipped)} more FLOPs than dense` : `${percent(skipped)} of the FLOPs skipped`);
  }
  if (result.loss !== null) parts.push(`loss ${result.loss.toFixed(3)} nats per token`);
  parts.push(`${(1000 * result.seconds).toFixed(0)} ms`);
  return `${parts.join("; ")}.`;
}
