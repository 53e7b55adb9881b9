"""Rules about settings that fail or waste a job: rows of `table.yaml`, and functions by subject.

Sources name functions of megatron-core 0.19.2 and Transformer Engine 2.18 to 2.20, unless they name a release. A
module is given by the end of its name: `experts:TEGroupedMLP.forward`. "H200" means that the failure was seen on one.
"""
