"""The run that a retrofit starts from."""

from tokendepth.errors import UserError
from tokendepth.retrofit_config import RetrofitConfig
from tokendepth.runs.run import Run


def open_base(config: RetrofitConfig) -> Run:
    """The finished dense run named by `config`, checked by the hash of its weights."""
    try:
        run = Run.open(config.base)
        found = run.fingerprint
    except UserError as error:
        raise UserError(f"the base of this retrofit cannot be used: {error}") from None
    if found != config.sha256:
        raise UserError(
            f"{config.base} holds other weights than this retrofit began with (SHA-256 {found[:12]}..., not "
            f"{config.sha256[:12]}...); put the base back, or retrofit again in another --out"
        )
    return run
