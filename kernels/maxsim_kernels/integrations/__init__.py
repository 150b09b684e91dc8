"""The operator under libraries that people already use: one line to switch it on, one to switch it off.

Nothing of a library is imported before it is asked for. `docs/integrations.md` says what each library keeps of its own rules.

switch.py                 `enable`, `disable`, `status`
patching.py               what may be patched: versions and signatures; giving functions our code and taking it away
calls.py                  one call: whether the operator takes it, autocast, the precision of float32, counting
sentence_transformers.py  functions of sentence-transformers, also for a loss's `similarity_fct=`
pylate.py                 functions of PyLate, also for a loss's `score_metric=`
colpali_engine.py         functions of colpali-engine
"""

from maxsim_kernels.integrations.patching import IntegrationError
from maxsim_kernels.integrations.switch import Enabled, Status, disable, enable, status

__all__ = ["Enabled", "IntegrationError", "Status", "disable", "enable", "status"]
