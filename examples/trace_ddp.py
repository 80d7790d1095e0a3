"""A training step as anyone writes it, to be traced without a GPU:

moestro predict --trace trace_ddp:step --world 64 --hardware h100-sxm --timeline step.json
"""

import os

import torch
import torch.distributed as dist
from torch import nn


def step() -> None:
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    layer = nn.TransformerEncoderLayer(2048, 16, 8192, batch_first=True, dropout=0.0, norm_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(device)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[device])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        batch = torch.randn(4, 2048, 2048, device=device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.3f}")
    dist.destroy_process_group()
