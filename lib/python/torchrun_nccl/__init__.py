"""torchrun_nccl: any unmodified PyTorch script on every GPU of every node of a batch job."""

__version__ = "0.1.0"
