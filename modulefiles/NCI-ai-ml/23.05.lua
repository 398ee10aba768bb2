-- For Lmod. Environment Modules reads the Tcl file of the same name; both do and say the same.
help([[
torchrun_nccl.sh runs any PyTorch script, unmodified, on every GPU of every node of a batch job:

    torchrun_nccl.sh SCRIPT ARGS...
    torchrun_nccl.sh ${NCI_AI_ML_ROOT}/examples/pytorch/torchrun_example.py 50 10

torchrun_nccl.sh --help says more.
]])
whatis("Name: NCI-ai-ml")
whatis("Version: " .. myModuleVersion())
whatis("Description: Runs any PyTorch script, unmodified, on every GPU of every node of a batch job")

-- The tree may have been moved, and this file or a folder above it may be a link in a site's own module tree.
local file = require("posix").realpath(myFileName())
local root = file:match("^(.*)/modulefiles/[^/]+/[^/]+$") or ""
local venv = pathJoin(root, "venv/bin")
if mode() == "load" and not isFile(root .. "/bin/torchrun_nccl.sh") then
    LmodError(myModuleFullName() .. ": '" .. root .. "/bin/torchrun_nccl.sh' is missing; its tree is found from '" ..
              file .. "'. Install the whole tree, and link module files into other trees, never copy them.\n")
end

setenv("NCI_AI_ML_ROOT", root)
setenv("NCI_AI_ML_BASE", root)
-- Whatever has come or gone in the tree since the load, an unload takes off all that a load may have put on.
if mode() == "unload" or isFile(pathJoin(venv, "python3")) then
    prepend_path("PATH", venv)
end
prepend_path("PATH", pathJoin(root, "bin"))
