"""The Triton kernels: NVIDIA from sm_80 on, AMD gfx942 and gfx950.

target.py describes GPUs, tuning.py holds launch parameters, codec.py and encoder.py the formats.
write.py and gather.py store tokens and read them back; decode.py and extend.py attend, with
attention.py between them, arguments.py before them, and plan.py to split long sequences. All but
target.py and tuning.py import Triton.
"""
