"""The upload of a trained model to the Hugging Face hub at the end of a run, for recipes with ``push_to_hub``.

The token is the one that ``hf auth login`` has stored, or ``HF_TOKEN``; only huggingface_hub reads it.
"""

import shlex

from rlflow.compiler.plan import Plan
from rlflow.errors import RecipeError, first_line
from rlflow.report.console import show_warning
from rlflow.report.tracker import redact
from rlflow.runtime.protocols import Report

_KEY = "push_to_hub"
_LOGIN = "hf auth login, or HF_TOKEN with a token that may write"
_LATER = "leave it out, and upload the model later: hf upload {name} FOLDER . --private"
# Files of an earlier upload that would be loaded in place of the new ones, or beside them.
_REPLACED = ["*.safetensors", "*.safetensors.index.json", "adapters/*"]


def pushed_role(plan: Plan) -> str | None:
    """Return the trained role whose model is uploaded: the only one, apart from critics. Return None without an upload.

    Raises RecipeError for a recipe that trains several.
    """
    if plan.recipe.push_to_hub is None:
        return None
    trained = plan.graph.trained_roles()
    roles = [role for role in trained if "Values" not in plan.graph.capabilities(role)] or trained
    if len(roles) > 1:
        fact = f"uploads the model of one role, and this recipe trains {', '.join(roles)}"
        raise RecipeError(_KEY, fact, fix=_LATER.format(name="USER/NAME"))
    return roles[0]


def check_sweep(plan: Plan) -> None:
    """Raise RecipeError for an upload by a job of a sweep, which would replace the model of the job before."""
    if pushed_role(plan) is not None:
        fact = "each job of a sweep would replace the model of the one before"
        raise RecipeError(_KEY, fact, fix=_LATER.format(name="USER/NAME"))


def check_push(plan: Plan) -> None:
    """Check that the model can be uploaded, and create the repository if it does not exist: private.

    Warns of a public repository. Raises RecipeError for a wrong name, and without a token that may write there.
    """
    if pushed_role(plan) is None:
        return
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import validate_repo_id

    name = str(plan.recipe.push_to_hub)
    try:
        validate_repo_id(name)
    except HFValidationError:
        name = ""
    if name.count("/") != 1:
        fact = f"expected the name of a repository, got '{plan.recipe.push_to_hub}'"
        raise RecipeError(_KEY, fact, fix=f"{_KEY}=USER/NAME")
    if get_token() is None:
        raise RecipeError(_KEY, "an upload to the Hugging Face hub needs a login, and there is none", fix=_LOGIN)
    api = HfApi()
    try:
        api.create_repo(name, private=True, exist_ok=True)
        api.auth_check(name, write=True)
        is_private = api.model_info(name).private
    except Exception as error:  # the network fails in many ways
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if status in (401, 403, 404):
            raise RecipeError(_KEY, f"your token may not write to '{name}' ({_reason(error)})", fix=_LOGIN) from None
        fact = f"the Hugging Face hub cannot be asked for '{name}' ({_reason(error)})"
        raise RecipeError(_KEY, fact, fix=_LATER.format(name=name)) from None
    if not is_private:
        show_warning(f"{_KEY}: the repository '{name}' is public, and so will be the model")


def push(plan: Plan, report: Report) -> str | None:
    """Upload the model of a finished run, and return its address. Return None if there is nothing to upload.

    A failed upload is a warning, because the model is in the run's folder.
    """
    role = pushed_role(plan)
    if role is None or role not in report.models:
        return None
    from huggingface_hub import HfApi

    name, folder = str(plan.recipe.push_to_hub), report.models[role]
    message = f"{report.name} after {report.steps} steps"
    try:
        commit = HfApi().upload_folder(
            repo_id=name, folder_path=folder, delete_patterns=_REPLACED, commit_message=message
        )
    except Exception as error:  # the network fails in many ways, and must not end a run that has finished
        again = f"hf upload {name} {shlex.quote(folder)} . --private"
        show_warning(f"{_KEY}: the model was not uploaded ({_reason(error)}); repeat with: {again}")
        return None
    return str(commit.repo_url)


def _reason(error: Exception) -> str:
    """Return an error in one line, without the token."""
    from huggingface_hub import get_token

    text, token = redact(first_line(error)), get_token()
    return text.replace(token, "***") if token else text
