"""What an evaluation will take: bytes, seconds, and whether it fits.

costs.py       what scoring costs, by arithmetic: sizes and rates in, seconds and bytes out
estimating.py  how long an evaluation will score, said in one line on stderr before it begins
plan.py        the plan of an evaluation: seconds of every path (`costs.py`), what is read from where, and whether it all fits
rates.py       rates of this machine, each by a short run of the real thing
room.py        what this machine has free now: memory, disks, GPU
sizes.py       how large an evaluation is: exact where its embeddings are cached, estimated from texts or a card where not
"""
