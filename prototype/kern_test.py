import os, sys
os.environ.setdefault("TRITON_INTERPRET","1"); sys.path[:0]=[os.getcwd(), os.getcwd()+"/.carry"]
import torch, kern
from tokendepth.config import *; from tokendepth.methods import build; from tokendepth.model import Pass
torch.manual_seed(0)
for D,H,FF,B,T in ((32,4,64,3,37),(64,2,128,2,16)):
    m=build(RunConfig(model=ModelConfig(D,3,H,FF,64,0.,11),method=TSAConfig())).eval(); blk=m.method.blocks[1]
    for p in blk.parameters():
        if p.dim()==2: p.data.mul_(.2/p.data.std())
    for f in (0.,.02,.4,1.):
        for wgt in (False,True):
            h=torch.randn(B,T,D); active=torch.rand(B,T)<f; w=torch.rand(B,T) if wgt else None
            with torch.no_grad():
                ref=blk.forward_active(h,Pass("sparse"),active,w)
                i,s=kern.compact(active); assert i[:int(s[-1])].tolist()==active.flatten().nonzero().flatten().tolist(), (i,s)
                a=kern.small_block(h.clone(),blk,active,w,{"BM1":16,"BN1":16,"BM3":16,"BN3":16,"BM4":16,"BN4":16,"BM5":16,"BF5":16})
                b=kern.wide_block(h.clone(),blk,active,w,{"BM":16,"BN":16,"BK":16,"BM4":16,"BN4":16})
            print(D,f,wgt,"small %.1e wide %.1e"%((a-ref).abs().max(),(b-ref).abs().max()))
