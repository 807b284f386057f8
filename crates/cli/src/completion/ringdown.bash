# Completions of ringdown for bash: `ringdown complete` knows commands and options, and asks the daemon for names.
_ringdown() {
    local line words=("${COMP_WORDS[@]:0:COMP_CWORD}")
    # Where such a word ends, what is to be completed is the empty one behind it.
    [[ ${COMP_WORDS[COMP_CWORD]} == [:=] ]] && words+=("${COMP_WORDS[COMP_CWORD]}")
    COMPREPLY=()
    while IFS= read -r line; do
        # It is a guest's word, and files of this host are none.
        if [[ $line == $'\t'* ]]; then
            compopt +o bashdefault +o default 2>/dev/null
            continue
        fi
        COMPREPLY+=("$(printf '%q' "${line%%$'\t'*}")")
    done < <(command ringdown complete -- "${words[@]}" "$2" 2>/dev/null)
    # More is to be typed behind these.
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[:/=] ]] && compopt -o nospace 2>/dev/null
    return 0
}
complete -o bashdefault -o default -F _ringdown ringdown
