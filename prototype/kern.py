"""Prototype: a gated block's sparse forward in few kernels, counts on the device, no host synchronisation (inference)."""
import math, torch, triton, triton.language as tl

@triton.jit
def _compact(active, index, starts, batch, time, BLOCK: tl.constexpr):
    b = tl.program_id(0); offs = tl.arange(0, BLOCK); before = 0
    for start in range(0, b * time, BLOCK):
        f = tl.load(active + start + offs, mask=start + offs < b * time, other=0).to(tl.int32)
        before += tl.sum(f, 0)
    tl.store(starts + b, before)
    for start in range(0, time, BLOCK):
        where = start + offs; inside = where < time
        f = tl.load(active + b * time + where, mask=inside, other=0).to(tl.int32)
        place = before + tl.cumsum(f, 0) - f
        tl.store(index + place, b * time + where, mask=inside & (f != 0))
        before += tl.sum(f, 0)
    if b == batch - 1:
        tl.store(starts + batch, before)

def compact(active):
    B, T = active.shape
    index = torch.empty(B * T, dtype=torch.int32, device=active.device); starts = torch.empty(B + 1, dtype=torch.int32, device=active.device)
    _compact[(B,)](active.view(torch.uint8), index, starts, B, T, BLOCK=min(1024, triton.next_power_of_2(T)))
    return index, starts

@triton.jit
def _norm_tile(x, w, b, D: tl.constexpr):
    mean = tl.sum(x, 1) / D; x = x - mean[:, None]
    var = tl.sum(x * x, 1) / D
    return x * tl.rsqrt(var + 1e-5)[:, None] * w[None, :] + b[None, :]

@triton.jit
def _gelu(x): return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))

@triton.jit
def _norm_linear(h, nw, nb, w, out, index, count, rows, OUT: tl.constexpr, D: tl.constexpr, GATHER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """out[r] = norm(h[r or index[r]]) @ w.T for w [OUT, D]; all of D in one tile."""
    pm = tl.program_id(0); pn = tl.program_id(1)
    n = rows
    if GATHER: n = tl.load(count)
    if pm * BM < n:
        r = pm * BM + tl.arange(0, BM); inside = r < n; c = tl.arange(0, D)
        src = r
        if GATHER: src = tl.load(index + r, mask=inside, other=0)
        x = tl.load(h + src.to(tl.int64)[:, None] * D + c[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        x = _norm_tile(x, tl.load(nw + c).to(tl.float32), tl.load(nb + c).to(tl.float32), D).to(h.dtype.element_ty)
        o = pn * BN + tl.arange(0, BN)
        wt = tl.load(w + o[:, None] * D + c[None, :], mask=(o < OUT)[:, None], other=0.0)
        acc = tl.dot(x, tl.trans(wt), input_precision="ieee")
        tl.store(out + r.to(tl.int64)[:, None] * OUT + o[None, :], acc.to(out.dtype.element_ty), mask=inside[:, None] & (o < OUT)[None, :])

@triton.jit
def _attention(q, kv, out, index, starts, time, scale, H: tl.constexpr, W: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """q, out [n, H*W] compact rows; kv [B*time, 2*H*W]: keys then values. Sequences have as many keys as queries."""
    b = tl.program_id(1) // H; head = tl.program_id(1) % H; m = tl.program_id(0)
    first = tl.load(starts + b); last = tl.load(starts + b + 1)
    if first + m * BM < last:
        D: tl.constexpr = H * W
        r = first + m * BM + tl.arange(0, BM); inside = r < last; c = tl.arange(0, W)
        pos = tl.load(index + r, mask=inside, other=0) - b * time
        pos = tl.where(inside, pos, 0)
        hi = tl.max(pos, 0) + 1
        qt = tl.load(q + r.to(tl.int64)[:, None] * D + head * W + c[None, :], mask=inside[:, None], other=0.0)
        base = kv + (b * time).to(tl.int64) * (2 * D) + head * W
        top = tl.full([BM], -float("inf"), tl.float32); total = tl.zeros([BM], tl.float32); acc = tl.zeros([BM, W], tl.float32)
        for start in range(0, hi, BN):
            j = start + tl.arange(0, BN); seen = j < hi
            kt = tl.load(base + j[:, None] * (2 * D) + c[None, :], mask=seen[:, None], other=0.0)
            s = tl.dot(qt, tl.trans(kt), input_precision="ieee") * scale
            s = tl.where(j[None, :] <= pos[:, None], s, -float("inf"))
            new = tl.maximum(top, tl.max(s, 1)); p = tl.exp2(s - new[:, None]); fade = tl.exp2(top - new)
            vt = tl.load(base + D + j[:, None] * (2 * D) + c[None, :], mask=seen[:, None], other=0.0)
            total = total * fade + tl.sum(p, 1); acc = acc * fade[:, None]
            acc = tl.dot(p.to(vt.dtype), vt, acc, input_precision="ieee"); top = new
        tl.store(out + r.to(tl.int64)[:, None] * D + head * W + c[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None])

@triton.jit
def _finish(att, h, wo, nw, nb, w1, b1, w2, b2, weight, index, count, FF: tl.constexpr, D: tl.constexpr, WEIGHTED: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr, BO: tl.constexpr):
    """h[index[r]] += out projection; then += FFN(norm(.)); in place, d in one tile, the hidden layer never leaves the chip."""
    pm = tl.program_id(0); n = tl.load(count)
    if pm * BM < n:
        r = pm * BM + tl.arange(0, BM); inside = r < n; c = tl.arange(0, D)
        src = tl.load(index + r, mask=inside, other=0).to(tl.int64)
        a = tl.load(att + r.to(tl.int64)[:, None] * D + c[None, :], mask=inside[:, None], other=0.0)
        wt = tl.load(wo + c[:, None] * D + c[None, :])
        up = tl.dot(a, tl.trans(wt), input_precision="ieee")
        x = tl.load(h + src[:, None] * D + c[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        g = tl.full([BM], 1.0, tl.float32)
        if WEIGHTED: g = tl.load(weight + src, mask=inside, other=0.0).to(tl.float32)
        x += g[:, None] * up
        y = _norm_tile(x, tl.load(nw + c).to(tl.float32), tl.load(nb + c).to(tl.float32), D).to(h.dtype.element_ty)
        acc = tl.zeros([BM, D], tl.float32)
        for start in range(0, FF, BF):
            f = start + tl.arange(0, BF)
            w1t = tl.load(w1 + f[:, None] * D + c[None, :])
            hid = tl.dot(y, tl.trans(w1t), input_precision="ieee") + tl.load(b1 + f).to(tl.float32)[None, :]
            hid = _gelu(hid).to(h.dtype.element_ty)
            w2t = tl.load(w2 + c[:, None] * FF + f[None, :])
            acc = tl.dot(hid, tl.trans(w2t), acc, input_precision="ieee")
        x += g[:, None] * (acc + tl.load(b2 + c).to(tl.float32)[None, :])
        tl.store(h + src[:, None] * D + c[None, :], x.to(h.dtype.element_ty), mask=inside[:, None])

@triton.jit
def _rows_linear(x, w, bias, res, weight, out, index, count, K: tl.constexpr, OUT: tl.constexpr,
                 GELU: tl.constexpr, RES: tl.constexpr, WEIGHTED: tl.constexpr, SCATTER: tl.constexpr, GATHER_RES: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr):
    """For wide models: out[r or index[r]] = res[...] + weight * f(x[r] @ w.T + bias), rows up to a count on the device."""
    n = tl.load(count); tiles_m = tl.cdiv(n, BM); tiles_n: tl.constexpr = (OUT + BN - 1) // BN
    pid = tl.program_id(0)
    if pid < tiles_m * tiles_n:
        width = GROUP * tiles_n; group = pid // width; size = tl.minimum(tiles_m - group * GROUP, GROUP)
        pm = group * GROUP + (pid % width) % size; pn = (pid % width) // size
        r = pm * BM + tl.arange(0, BM); inside = r < n; o = pn * BN + tl.arange(0, BN); k = tl.arange(0, BK)
        acc = tl.zeros([BM, BN], tl.float32)
        xp = x + r.to(tl.int64)[:, None] * K + k[None, :]; wp = w + o[:, None] * K + k[None, :]
        for start in range(0, K, BK):
            a = tl.load(xp, mask=inside[:, None], other=0.0); b = tl.load(wp, mask=(o < OUT)[:, None], other=0.0)
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee"); xp += BK; wp += BK
        if BIAS: acc += tl.load(bias + o, mask=o < OUT, other=0.0).to(tl.float32)[None, :]
        if GELU: acc = _gelu(acc)
        dst = r.to(tl.int64)
        if SCATTER or GATHER_RES or WEIGHTED: src = tl.load(index + r, mask=inside, other=0).to(tl.int64)
        if WEIGHTED: acc = acc * tl.load(weight + src, mask=inside, other=0.0).to(tl.float32)[:, None]
        ok = inside[:, None] & (o < OUT)[None, :]
        if RES:
            rr = dst
            if GATHER_RES: rr = src
            acc += tl.load(res + rr[:, None] * OUT + o[None, :], mask=ok, other=0.0).to(tl.float32)
        if SCATTER: dst = src
        tl.store(out + dst[:, None] * OUT + o[None, :], acc.to(out.dtype.element_ty), mask=ok)

@triton.jit
def _norm_rows(x, nw, nb, out, index, count, rows, D: tl.constexpr, BD: tl.constexpr, GATHER: tl.constexpr, COUNTED: tl.constexpr):
    r = tl.program_id(0); n = rows
    if COUNTED: n = tl.load(count)
    if r < n:
        c = tl.arange(0, BD); ok = c < D; src = r
        if GATHER: src = tl.load(index + r)
        v = tl.load(x + src.to(tl.int64) * D + c, mask=ok, other=0.0).to(tl.float32)
        mean = tl.sum(v, 0) / D; z = tl.where(ok, v - mean, 0.0); var = tl.sum(z * z, 0) / D
        y = z * tl.rsqrt(var + 1e-5) * tl.load(nw + c, mask=ok, other=0.0).to(tl.float32) + tl.load(nb + c, mask=ok, other=0.0).to(tl.float32)
        tl.store(out + r.to(tl.int64) * D + c, y.to(out.dtype.element_ty), mask=ok)

def attention_rows(q, kv, index, starts, B, T, H, W, BM=64, BN=64, warps=4, stages=2):
    out = torch.empty_like(q)
    _attention[(triton.cdiv(T, BM), B * H)](q, kv, out, index, starts, T, 1.4426950408889634 / math.sqrt(W), H=H, W=W, BM=BM, BN=BN, num_warps=warps, num_stages=stages)
    return out

def small_block(h, blk, active, weight=None, cfg=None):
    """h [B,T,D] contiguous, changed in place. D a power of two up to 256."""
    c = {"BM1":64,"BN1":128,"W1":4,"BM3":64,"BN3":64,"W3":4,"BM4":64,"BN4":64,"W4":4,"BM5":64,"BF5":64,"W5":8,"S5":2, **(cfg or {})}
    B, T, D = h.shape; N = B * T; H = blk.attention.n_head; FF = blk.ffn.up.out_features
    wq, wkv = blk.attention.qkv.weight[:D], blk.attention.qkv.weight[D:]
    index, starts = compact(active); count = starts[B:]
    na, nf = blk.norm_attention, blk.norm_ffn
    kv = torch.empty(N, 2 * D, dtype=h.dtype, device=h.device); q = torch.empty(N, D, dtype=h.dtype, device=h.device)
    _norm_linear[(triton.cdiv(N, c["BM1"]), triton.cdiv(2 * D, c["BN1"]))](h, na.weight, na.bias, wkv, kv, index, count, N, OUT=2 * D, D=D, GATHER=False, BM=c["BM1"], BN=c["BN1"], num_warps=c["W1"])
    _norm_linear[(triton.cdiv(N, c["BM3"]), triton.cdiv(D, c["BN3"]))](h, na.weight, na.bias, wq, q, index, count, N, OUT=D, D=D, GATHER=True, BM=c["BM3"], BN=c["BN3"], num_warps=c["W3"])
    att = attention_rows(q, kv, index, starts, B, T, H, D // H, c["BM4"], c["BN4"], c["W4"])
    _finish[(triton.cdiv(N, c["BM5"]),)](att, h, blk.attention.out.weight, nf.weight, nf.bias, blk.ffn.up.weight, blk.ffn.up.bias, blk.ffn.down.weight, blk.ffn.down.bias, weight if weight is not None else h, index, count,
        FF=FF, D=D, WEIGHTED=weight is not None, BM=c["BM5"], BF=c["BF5"], BO=64, num_warps=c["W5"], num_stages=c["S5"])
    return h

def wide_block(h, blk, active, weight=None, cfg=None):
    """Any D: library product for keys and values of all tokens, kernels with a device count for the active rows. In place."""
    c = {"BM":128,"BN":128,"BK":64,"W":8,"S":3,"G":8,"BM4":128,"BN4":64,"W4":4, **(cfg or {})}
    B, T, D = h.shape; N = B * T; H = blk.attention.n_head; FF = blk.ffn.up.out_features; dev = h.device
    wq, wkv = blk.attention.qkv.weight[:D], blk.attention.qkv.weight[D:]
    index, starts = compact(active); count = starts[B:]; na, nf = blk.norm_attention, blk.norm_ffn
    x = torch.nn.functional.layer_norm(h, (D,), na.weight, na.bias)
    kv = torch.nn.functional.linear(x, wkv).view(N, 2 * D)
    E = lambda m: torch.empty(N, m, dtype=h.dtype, device=dev)
    xr, q, y, up = E(D), E(D), E(D), E(FF); rows = E(D)
    BD = triton.next_power_of_2(D); wt = weight if weight is not None else h
    # gather normalised rows, then Q
    _norm_rows[(N,)](h, na.weight, na.bias, xr, index, count, N, D=D, BD=BD, GATHER=True, COUNTED=True, num_warps=4)
    def lin(x, w, b, res, out, K, O, gelu=False, r=False, wg=False, sc=False, gr=False):
        _rows_linear[(triton.cdiv(N, c["BM"]) * triton.cdiv(O, c["BN"]),)](x, w, b if b is not None else w, res, wt, out, index, count, K=K, OUT=O, GELU=gelu, RES=r, WEIGHTED=wg and weight is not None, SCATTER=sc, GATHER_RES=gr,
            BM=c["BM"], BN=c["BN"], BK=c["BK"], GROUP=c["G"], BIAS=b is not None, num_warps=c["W"], num_stages=c["S"])
    lin(xr, wq, None, h, q, D, D)
    att = attention_rows(q, kv, index, starts, B, T, H, D // H, c["BM4"], c["BN4"], c["W4"])
    lin(att, blk.attention.out.weight, None, h, rows, D, D, r=True, gr=True, wg=True)
    _norm_rows[(N,)](rows, nf.weight, nf.bias, y, index, count, N, D=D, BD=BD, GATHER=False, COUNTED=True, num_warps=4)
    lin(y, blk.ffn.up.weight, blk.ffn.up.bias, h, up, D, FF, gelu=True)
    lin(up, blk.ffn.down.weight, blk.ffn.down.bias, rows, h, FF, D, r=True, wg=True, sc=True)
    return h
