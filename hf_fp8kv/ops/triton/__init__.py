"""The Triton kernels: NVIDIA from sm_80 on, AMD gfx942 and gfx950.

target.py says what a GPU can do, tuning.py how a kernel is cut for it; codec.py holds the formats,
write.py and gather.py what goes into pages and comes out of them, attention.py the inner part that
decode.py and extend.py share. All but target.py and tuning.py import Triton.
"""
