"""What several processes share, how they fail together, and what a run took.

agreement.py    what several processes must have in common before they work on one thing
failures.py     how an evaluation of several processes ends early
free_memory.py  how much memory this process may still take
peak_memory.py  the most memory that was in use while something ran: of the process, and of its GPU
progress.py     the one progress bar of a path, or of encoding
turns.py        work in turns: pieces made by several threads, and written by others
world.py        several processes, one evaluation: `torchrun --nproc-per-node 8 evaluate.py ...` on one machine or many
"""
