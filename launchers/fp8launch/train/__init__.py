"""The part of fp8launch that runs inside the job: plain files, copied as one folder `code/` into every run folder.

Nothing here imports fp8launch, and of this fp8launch imports only `policy` and `saved`: a job's image has torch and
Megatron but not this package, a login node has this package but not torch. Files find each other because Python puts
the folder of the script that it starts (`worker.py`, `node.py`) on `sys.path`.
"""
