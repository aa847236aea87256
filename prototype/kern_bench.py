import os, sys, time
sys.path[:0]=[os.getcwd(), os.getcwd()+"/.carry"]
import torch, kern, triton
import torch.nn.functional as F
from tokendepth.config import *; from tokendepth.methods import build; from tokendepth.model import Pass
torch.set_grad_enabled(False); dev="cuda"; BF=torch.bfloat16
def graph(f):
    s=torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        for _ in range(3): f()
    torch.cuda.current_stream().wait_stream(s); g=torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): out=f()
    return g,out
def timed(gs,n=30):
    ts={k:[] for k in gs}; e0,e1=torch.cuda.Event(True),torch.cuda.Event(True)
    for i in range(n+3):
        for k,g in gs.items():
            e0.record(); g.replay(); e1.record(); e1.synchronize()
            if i>=3: ts[k].append(e0.elapsed_time(e1))
    return {k:sorted(v)[len(v)//2] for k,v in ts.items()}
def ceiling(dense,tsa,T,V,d,f):
    ds=dense.method.sites(T); t=tsa.method.sites(T); head=2*d*V
    return (sum(s.always+s.active for s in ds)+head)/(sum(s.always+s.router+(s.active if not s.routed else f*s.active) for s in t)+head)
def shape(name,M,B,fr,block,cfgs):
    T=M.context; torch.manual_seed(0)
    dense=build(RunConfig(model=M,method=DenseConfig())).to(dev,BF).eval(); tsa=build(RunConfig(model=M,method=TSAConfig())).to(dev,BF).eval()
    ids=torch.randint(M.vocab_size,(B,T),device=dev)
    comp=torch.compile(dense); t=time.time()
    gs={"dense":graph(lambda: comp(ids).logits)[0]}; print(name,"compile %.0f s"%(time.time()-t),flush=True)
    blocks=tsa.method.blocks; stem=torch.compile(blocks[0])
    def full(active,cfg,routers=True):
        h=tsa.embedding(ids)+tsa.positions.weight[:T]
        h=stem(h,Pass("hard")).contiguous()
        for l,b in enumerate(blocks[1:]):
            if routers: r=b.router; lg=F.linear(F.relu(F.linear(h,r.hidden.weight,r.hidden.bias)),r.logit.weight,r.logit.bias)[...,0]
            h=block(h,b,active[l],None,cfg)
        return F.linear(tsa.norm(h),tsa.embedding.weight)
    draws=torch.rand(M.n_layer-1,B,T,device=dev)
    ref=tsa(ids,execution="hard",decisions=draws<.4).logits.float()
    ref32=build(RunConfig(model=M,method=TSAConfig())).to(dev).eval(); ref32.load_state_dict({k:v.float() for k,v in tsa.state_dict().items()})
    exact=ref32(ids[:2],execution="hard",decisions=(draws<.4)[:,:2]).logits
    for cn,cfg in cfgs.items():
        try:
            out=full(draws<.4,cfg).float(); rel=lambda a,b:((a-b).norm()/b.norm()).item()
            print("  ",cn,"error kernels %.2e, library %.2e"%(rel(out[:2],exact),rel(ref[:2],exact)),flush=True)
            for f in fr: gs[cn,f]=graph(lambda f=f: full(draws<f,cfg))[0]
        except Exception as e: print("  ",cn,"FAILED",repr(e)[:300],flush=True)
    t=timed(gs); d=t["dense"]; print("  dense %.3f ms"%d)
    for k,v in t.items():
        if k!="dense": c=ceiling(dense,tsa,T,M.vocab_size,M.d_model,k[1]); print("   %-14s f %.3f: %.3f ms  %.2fx of at most %.2f, efficiency %.2f"%(k[0],k[1],v,d/v,c,(d/v-1)/(c-1) if c>1 else 0),flush=True)
which=sys.argv[1:] or ["paper64","paper8","paper1","gpt2"]
P=ModelConfig(context=256,vocab_size=6064,dropout=0.0)
SM={"base":{}, "bm32":{"BM5":32,"W5":4}, "bf128":{"BF5":128}, "bm128":{"BM5":128,"W5":8}, "w4":{"W5":4}}
for w in which:
    if w.startswith("paper"): shape(w,P,int(w[5:]),(.1,.4,.726,1.0),kern.small_block,SM)
    if w=="gpt2": shape(w,ModelConfig(768,12,12,3072,1024,0.,50304),16,(.1,.4,.6,.8),kern.wide_block,{"base":{}, "bn256":{"BN":256}, "s4":{"S":4}})
    if w=="d1024": shape(w,ModelConfig(1024,24,16,4096,1024,0.,50304),8,(.1,.4,.6,.8),kern.wide_block,{"base":{}, "bn256":{"BN":256}})
