"""Shows plans and reports to a person: text on a terminal or in a file, HTML in a notebook."""

from rich.console import Console

from rlflow.compiler.plan import Plan
from rlflow.report.console import WIDTH, output_console, print_picture
from rlflow.report.plan_text import render
from rlflow.report.report_view import report_html, report_text
from rlflow.runtime.protocols import Report


def show(shown: Plan | Report, *, explain: bool = False) -> None:
    """Show a plan as the command line does, or what a run has reached.

    ``explain`` adds to a plan its graph, all alternatives and all limits.
    """
    console = Console()
    if isinstance(shown, Plan):
        picture = render(shown, explain=explain, width=min(WIDTH, output_console().width))
        if console.is_jupyter:
            console.print(picture)
        else:
            print_picture(picture)
    elif console.is_jupyter:
        from IPython.display import HTML, display  # exists where a notebook runs

        display(HTML(report_html(shown)))
    else:
        print_picture(report_text(shown))
