# Completions of ringdown for fish: `ringdown complete` knows commands and options, and asks the daemon for names.
function __ringdown_complete
    set --local before (commandline --current-process --tokenize --cut-at-cursor)
    set --local found (command ringdown complete -- $before (commandline --current-token --cut-at-cursor) 2>/dev/null)
    if test (count $found) -gt 0
        # A line without a word: it is a guest's, and files of this host are none.
        string match --invert --regex '^\t' -- $found
    else
        __fish_complete_path (commandline --current-token --cut-at-cursor)
    end
end
complete --command ringdown --no-files --arguments '(__ringdown_complete)'
