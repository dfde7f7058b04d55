"""The Triton kernels, for NVIDIA GPUs from sm_80 on and AMD gfx942 and gfx950.

target.py describes GPUs. tuning.py holds launch parameters. codec.py and encoder.py convert
formats. write.py stores tokens, and gather.py reads them back. decode.py has the attention kernel.
attention.py has its device code, arguments.py its arguments, and extend.py its launch for many
query rows. schedule.py splits long sequences. All modules except target.py and tuning.py import
Triton.
"""
