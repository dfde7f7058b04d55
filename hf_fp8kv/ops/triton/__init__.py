"""The Triton kernels, for NVIDIA GPUs from sm_80 on and AMD gfx942 and gfx950.

target.py describes GPUs. tuning.py holds launch parameters. codec.py and encoder.py convert
formats. write.py stores tokens, and gather.py reads them back. decode.py and extend.py compute
attention: they share the device code in attention.py and the arguments in arguments.py. plan.py
splits long sequences. All modules except target.py and tuning.py import Triton.
"""
