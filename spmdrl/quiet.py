"""Less noise from the libraries, so that a run's own lines are seen. SPMDRL_VERBOSE=1 leaves everything on."""

import logging
import os
import warnings


def quiet_libraries(*, is_main: bool) -> None:
    """Warnings and progress bars of the libraries off, errors on.

    Call with DeepSpeed imported, which sets its logger's level then, and vLLM not yet.
    """
    if os.environ.get("SPMDRL_VERBOSE"):
        return
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message="resource_tracker: There appear to be")
    for name, level in (("VLLM_LOGGING_LEVEL", "ERROR"), ("TORCH_CPP_LOG_LEVEL", "ERROR")):
        os.environ.setdefault(name, level)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    if not is_main:
        hf_logging.disable_progress_bar()
        logging.getLogger("spmdrl").setLevel(logging.ERROR)  # the main rank has said it
