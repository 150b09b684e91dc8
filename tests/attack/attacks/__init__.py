"""The attack on the command line: damaged files and killed commands, each of which must end well or with one clear line.

mutations.py   ways to damage bytes, lines, JSON and places, each decided by a random number generator alone
stored.py      ways to damage HDF5 files, manifests and arrays that only someone who knows the format would find
specimen.py    a finished tiny collection, as small as everything that is attacked can be
truth.py       plain second readings of the files, which say what a command that succeeds must have answered
targets.py     what is attacked: files, the commands that read them, and the truth about their answers
endings.py     what a command did, and whether that is allowed
fuzzing.py     one case: a copy, one thing damaged, one command, and the judgement of how it ended
running.py     one command in this process, with a time limit and what it printed
workers.py     many cases in forked processes, so that a crash or a hang costs one case
killing.py     commands killed at a counted write, run again, and compared byte by byte
"""
