"""What an evaluation will take: bytes, seconds, and whether it fits.

around.py      what is done before scoring and after, each timed on a sample: encoding; comparison, metrics and report
costs.py       what scoring costs, by arithmetic: sizes and rates in, seconds and bytes out
estimating.py  how long scoring will take, said in one line on stderr before it begins
hardware.py    GPUs that are not here, as a table of peaks and the share of them that our kernels reach
plan.py        the plan of an evaluation: seconds of every phase (`costs.py`), what is read from where, and whether it all fits
rates.py       rates of this machine, each by short runs of the real thing until they agree
room.py        what this machine has free now: memory, disks, GPU
sizes.py       how large an evaluation is: exact where its embeddings are cached, estimated from texts or a card where not
"""
